"""The ``claim_*`` settings of a Celery app: one table, one resolver.

Celery's own ``add_defaults`` would override the user's configuration object, so settings are read
with ``app.conf.get`` and their defaults stand here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from celery_claim.exceptions import ConfigurationError, did_you_mean

#: Default of claim_max_concurrency.
MAX_CONCURRENCY = 32


def _setting(default: Any, unit: str, meaning: str, check: Callable[[Any], bool], expected: str) -> Any:
    metadata = {"unit": unit, "meaning": meaning, "check": check, "expected": expected}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _number(minimum: float) -> Callable[[Any], bool]:
    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and minimum <= value < float("inf")

    return is_number


def _whole(minimum: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _optional(kind: type) -> Callable[[Any], bool]:
    return lambda value: value is None or isinstance(value, kind)


@dataclass(frozen=True)
class Settings:
    """Every ``claim_*`` setting with its default; the names lack the prefix."""

    #: The key must hold the word "database": Celery and Flower mask values by such words only.
    database_url: str | None = _setting(
        None,
        "SQLAlchemy URL",
        "Where the tables are; a task may have its own database_url or engine.",
        lambda value: value is None or isinstance(value, str) or hasattr(value, "render_as_string"),
        "a SQLAlchemy URL such as mysql+mysqldb://user@host/name",
    )
    database_engine_options: Mapping[str, Any] = _setting(
        {}, "dict", "Passed to sqlalchemy.create_engine.", lambda value: isinstance(value, Mapping), "a dict"
    )
    create_tables: bool = _setting(
        True,
        "",
        "Workers make celery_claim's own tables when they start; with False only `celery claim initdb` does.",
        lambda value: isinstance(value, bool),
        "True or False",
    )
    table_prefix: str = _setting(
        "celery_claim_",
        "",
        "What the names of celery_claim's own tables begin with.",
        lambda value: isinstance(value, str) and value.isidentifier() and len(value) <= 40,
        "letters, digits and underscores, at most 40",
    )
    table_schema: str | None = _setting(
        None, "", "Schema of celery_claim's own tables.", _optional(str), "a schema name or None"
    )
    max_concurrency: int = _setting(
        MAX_CONCURRENCY, "consumers", "Hard cap of every window's concurrency.", _whole(1), ">= 1"
    )
    maintenance_interval: float = _setting(
        5.0, "s", "How often each worker looks for expired leases and due retries.", _number(0.1), "seconds >= 0.1"
    )
    max_clock_skew: float = _setting(
        1.0,
        "s",
        "Difference between a worker's clock and the database's that check warns of; no decision depends on it.",
        _number(0.0),
        "seconds >= 0",
    )
    node_name: str | None = _setting(
        None,
        "",
        "Name of this node in worker_id and in the register of nodes; by default the Celery worker's. One name, one "
        "worker.",
        lambda value: value is None or (isinstance(value, str) and 0 < len(value) <= 190),
        "a name of at most 190 characters, or None",
    )
    node_role: str | None = _setting(
        None,
        "",
        "Role of this node, as `celery worker --claim-role` and the environment variable CLAIM_NODE_ROLE; one of the "
        "nodes with the role main is the main node.",
        _optional(str),
        "a name such as 'main', or None",
    )
    main_node: str | None = _setting(
        None, "", "Name of the node that is the main node, whatever its role.", _optional(str), "a node's name or None"
    )
    node_heartbeat: float = _setting(
        5.0, "s", "How often a node, and each running run, tells that it lives.", _number(0.1), "seconds >= 0.1"
    )
    node_timeout: float = _setting(
        20.0,
        "s",
        "After so long without a heartbeat a node gets no runs, and a run's consumer id is free again; at least twice "
        "claim_node_heartbeat.",
        _number(0.2),
        "seconds >= 0.2",
    )
    accept_timeout: float = _setting(
        5.0,
        "s",
        "After so long a run whose message was not sent is sent, and one of run_type auto that its node has not "
        "started goes to another.",
        _number(0.1),
        "seconds >= 0.1",
    )
    kill_grace: float = _setting(
        5.0, "s", "Time between the soft and the hard time limit of a run.", _number(0.0), "seconds >= 0"
    )
    lease_ttl: float = _setting(
        15.0,
        "s",
        "How long ordinary beat entries rest when the beat that sends them is killed; it renews its lease every third "
        "of this.",
        _number(1.0),
        "seconds >= 1",
    )
    history_retention: float = _setting(
        604800.0, "s", "How long runs stay in the history.", _number(0.0), "seconds >= 0"
    )
    history_max_rows: int = _setting(1_000_000, "rows", "How many runs stay in the history at most.", _whole(1), ">= 1")
    log_empty_runs: bool = _setting(
        True,
        "",
        "Keep runs that found no row in the history.",
        lambda value: isinstance(value, bool),
        "True or False",
    )


PREFIX = "claim_"

#: Settings of parts that this version does not have yet: accepted, so that one configuration serves a fleet in the
#: middle of an upgrade, and without effect.
PLANNED = frozenset(
    PREFIX + name
    for name in (
        "push_timeout",
        "max_package_size",
        "max_running",
        "allowed_jobs",
    )
)


def known() -> tuple[str, ...]:
    """The names of all settings, as a user writes them."""
    return tuple(PREFIX + each.name for each in fields(Settings))


def resolve(conf: Any) -> Settings:
    """Settings out of a Celery configuration.

    Raises ConfigurationError naming the setting, what was expected and, for an unknown name, the closest known one.
    """
    conf.get(PREFIX + "database_url")  # a lazy configuration shows its layers only after a look-up
    present = {name: conf.get(name) for name in _names(conf) if name.startswith(PREFIX)}
    for name in present:
        if name not in known() and name not in PLANNED:
            raise ConfigurationError(f"unknown setting {name!r}.{did_you_mean(name, known())}")
    values = {}
    for each in fields(Settings):
        name = PREFIX + each.name
        if name not in present:
            continue
        value = present[name]
        if not each.metadata["check"](value):
            shown = "the given value" if "database" in name else repr(value)
            raise ConfigurationError(f"{name}: {shown} does not work, expected {each.metadata['expected']}")
        values[each.name] = value
    settings = Settings(**values)
    if settings.node_timeout < 2 * settings.node_heartbeat:
        raise ConfigurationError(
            f"claim_node_timeout={settings.node_timeout:g} is less than twice claim_node_heartbeat="
            f"{settings.node_heartbeat:g}: a live node would count as dead whenever one heartbeat is late"
        )
    return settings


def misread(conf: Any) -> list[str]:
    """Names such as CLAIM_DATABASE_URL that a configuration holds and Celery does not read without a namespace."""
    namespace = getattr(conf, "prefix", None)
    return [] if namespace else sorted(name for name in _written(conf) if name.startswith(PREFIX.upper()))


def _names(conf: Any) -> set[str]:
    """The settings of ours that the configuration holds, in lower case and without Celery's namespace."""
    namespace = getattr(conf, "prefix", None) or ""
    written = _written(conf)
    names = {name for name in written if name.startswith(PREFIX)}
    if namespace:
        ours = namespace + PREFIX.upper()
        names |= {name[len(namespace) :].lower() for name in written if name.startswith(ours)}
    return names


def _written(conf: Any) -> set[str]:
    """Every key of every layer of the configuration, as its author wrote it."""
    written: set[str] = set()
    for layer in getattr(conf, "maps", [conf]):
        try:
            written.update(name for name in layer if isinstance(name, str))
        except TypeError:  # an object that cannot be iterated has nothing to list
            continue
    return written
