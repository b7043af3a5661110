"""Which options a task of ours takes, and which values can work.

Names are checked when a task class is made, values when it is bound to its app: `task_annotations` may change them
in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from celery_claim.exceptions import ConfigurationError, did_you_mean

#: Options that Celery reads from a task but does not declare on its Task class.
UNDECLARED_BY_CELERY = frozenset(
    "queue exchange exchange_type routing_key delivery_mode compression immediate mandatory autoretry_for "
    "dont_autoretry_for retry_kwargs retry_backoff retry_backoff_max retry_jitter autoregister abstract shared "
    "app name run bind base pydantic pydantic_strict pydantic_context pydantic_dump_kwargs headers".split()
)
#: With these Celery would publish the whole run again because of one row.
AUTORETRY = ("autoretry_for", "dont_autoretry_for", "retry_kwargs")

BATCH_SIZE_LIMIT = 1000
SHORTEST_LEASE = 2


def check_names(cls: type, base: type) -> None:
    """Refuse an option of @app.task that nothing reads. Raises ConfigurationError with a did-you-mean and file:line.

    A class statement is not checked: classes add attributes of their own.
    """
    if not cls.__dict__.get("_decorated"):
        return
    known = {name for name in dir(base) if not name.startswith("_")} | UNDECLARED_BY_CELERY
    for name in cls.__dict__:
        if not name.startswith("_") and name not in known:
            raise ConfigurationError(f"{where(cls)}: unknown option {name!r}.{did_you_mean(name, known)}")


def where(cls: type) -> str:
    """The task and the place of its code, for error messages."""
    function: Any = cls.__dict__.get("__wrapped__") or getattr(cls, "process", cls)
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    name = getattr(cls, "name", None) or f"{cls.__module__}.{cls.__name__}"
    return f"task {name} ({code.co_filename}:{code.co_firstlineno})" if code else f"task {name}"


def check_values(cls: Any) -> None:
    """Refuse values that cannot work. Raises ConfigurationError naming the option, its value and what was expected."""
    for name in AUTORETRY:
        if getattr(cls, name, None):
            raise ConfigurationError(
                f"{where(cls)}: {name} would run the whole window again because of one row; use max_retries, "
                "retry_backoff and no_retry_for, which retry the row"
            )
    for name, (works, expected) in _EXPECTED.items():
        value = getattr(cls, name, _ABSENT)
        if value is _ABSENT:
            continue
        if not works(value):
            raise ConfigurationError(f"{where(cls)}: {name}={value!r} does not work, expected {expected}")
    _check_table(cls)
    cls.check_together()
    check_handler(cls)


def _check_table(cls: Any) -> None:
    if (cls.model is None) == (cls.table is None):
        given = "both" if cls.model is not None else "neither"
        raise ConfigurationError(
            f"{where(cls)}: {given} of model= and table= given; expected model=<ORM class or Table> or "
            "table='name of an existing table'"
        )
    if cls.database_url is not None and cls.engine is not None:
        raise ConfigurationError(f"{where(cls)}: database_url= and engine= are two answers to one question; give one")
    if cls.engine is not None and not hasattr(cls.engine, "url"):
        raise ConfigurationError(
            f"{where(cls)}: engine={type(cls.engine).__name__} is no SQLAlchemy engine; a URL goes into database_url="
        )


def check_handler(cls: Any) -> None:
    """Refuse a handler that cannot be called with what it will get."""
    handler, arguments = cls.handler_and_arguments()
    if handler is None:
        raise ConfigurationError(f"{where(cls)}: no handler; define process(self, row) or process_batch(self, rows)")
    try:
        inspect.signature(handler).bind(*[object()] * len(arguments))
    except TypeError:
        raise ConfigurationError(
            f"{where(cls)}: the handler must take ({', '.join(arguments)}), but is "
            f"{getattr(handler, '__name__', handler)}{inspect.signature(handler)}"
        ) from None
    except ValueError:  # a built-in function does not tell its signature
        return


def _whole(minimum: int, maximum: float = float("inf")) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and minimum <= value <= maximum


def _seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < float("inf")


def _or_none(works: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or works(value)


def _is_breaker(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and _whole(1)(value[0]) and 0 < value[1] <= 1


def _is_exceptions(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(
        isinstance(each, type) and issubclass(each, BaseException) for each in value
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


#: No option of this kind of task.
_ABSENT = object()

_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "table": (_or_none(lambda value: isinstance(value, str) and bool(value)), "the name of an existing table"),
    "schema": (_or_none(lambda value: isinstance(value, str) and bool(value)), "the name of a schema"),
    "columns": (lambda value: isinstance(value, Mapping), "a dict of claim column -> name in the table"),
    "values": (_or_none(lambda value: isinstance(value, Mapping)), "a dict of status -> value in the table"),
    "batch_size": (_whole(1, BATCH_SIZE_LIMIT), f"a whole number from 1 to {BATCH_SIZE_LIMIT}"),
    "lease_seconds": (
        _or_none(_whole(SHORTEST_LEASE, 2**31 - 2)),
        f"whole seconds >= {SHORTEST_LEASE} (the database's clock counts whole seconds), or None for no recovery",
    ),
    "row_time_limit": (_or_none(lambda value: _seconds(value) and value > 0), "seconds > 0, or None"),
    "max_retries": (_or_none(_whole(0)), "a whole number >= 0, or None for no limit"),
    "max_reclaims": (_or_none(_whole(0, 32767)), "a whole number from 0 to 32767, or None for no limit"),
    "retry_backoff": (_seconds, "seconds >= 0"),
    "retry_backoff_max": (_seconds, "seconds >= 0"),
    "retry_jitter": (_is_flag, "True or False"),
    "no_retry_for": (_is_exceptions, "a tuple of exception classes"),
    "write_back": (lambda value: value in ("row", "batch"), "'row' or 'batch'"),
    "transactional": (_is_flag, "True or False"),
    "skip_locked": (_is_flag, "True or False"),
    "failure_breaker": (_or_none(_is_breaker), "(number of rows >= 1, share from 0 to 1), or None"),
}
