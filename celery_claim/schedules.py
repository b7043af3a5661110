"""`window(...)`: an entry of beat_schedule that keeps consumers of a task at work."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from celery.schedules import schedstate, schedule
from celery.signals import beat_init, import_modules

from celery_claim.exceptions import ConfigurationError, did_you_mean
from celery_claim.settings import MAX_CONCURRENCY
from celery_claim.windows.window import RUN_TYPES, milliseconds

logger = logging.getLogger(__name__)

#: The task that opens windows, and the queue it travels on; every armed worker consumes it whatever its -Q says.
FIRE_TASK = "celery_claim.fire"
FIRE_QUEUE = "celery_claim"


class grid(schedule):
    """A plain interval that is due when a new slot of its grid has begun: the multiples of it since 1970.

    It only says when to send `celery_claim.fire`; what a fire does is decided in the database. Other schedulers take
    it for an interval of any phase, and that is enough.
    """

    def __init__(self, seconds: float, app: Any = None) -> None:
        super().__init__(seconds, app=app)
        self.frequency = float(seconds)

    def is_due(self, last_run_at: datetime) -> schedstate:
        now = time.time()
        wait = self.frequency - now % self.frequency
        slot = math.floor(now / self.frequency)
        due = math.floor(self.maybe_make_aware(last_run_at).timestamp() / self.frequency) < slot
        return schedstate(is_due=due, next=wait)

    def __repr__(self) -> str:
        return f"<grid: every {self.frequency:g} s>"

    def __eq__(self, other: object) -> bool:
        return self.frequency == other.frequency if isinstance(other, grid) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.frequency)

    def __reduce__(self) -> tuple[Any, ...]:
        # Not the app, which an inherited one would pickle with all its passwords.
        return type(self), (self.frequency,)


def window(
    task: Any,
    *,
    frequency: float,
    max_run_time: float | None = None,
    concurrency: int = 1,
    max_concurrency: int | None = None,
    run_type: str = "auto",
    name: str | None = None,
    queue: str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    enabled: bool = True,
    continuous: bool = False,
    min_interval: float | None = None,
) -> dict[str, Any]:
    """A beat entry: every `frequency` seconds, `concurrency` consumers of the task start rows for `max_run_time`.

    `task` is a task, which is not evaluated if it is lazy, or a task's name. `max_run_time` is half the frequency by
    default and, unless the window is continuous, at most. `run_type`: where the consumers run: "auto" all on one live
    node, "all" on every node, "main" on the main node, "any" wherever a worker is free. `name`: the key of the entry
    by default. `queue`: only nodes that consume it are meant. `continuous`: a consumer whose time runs out while rows
    are left goes on at once as a new run. `min_interval`: seconds between two triggers by hand or by `wake()`.

    The entry works under every scheduler that knows plain intervals. Raises ConfigurationError (an
    ImproperlyConfigured) for values that cannot work.
    """
    _expect(_is_seconds(frequency), "frequency", frequency, "seconds > 0")
    max_run_time = frequency / 2 if max_run_time is None else max_run_time
    _expect(_is_seconds(max_run_time), "max_run_time", max_run_time, "seconds > 0")
    for label, flag in (("enabled", enabled), ("continuous", continuous)):
        _expect(isinstance(flag, bool), label, flag, "True or False")
    if max_run_time > frequency / 2 and not continuous:
        raise ConfigurationError(
            f"window: max_run_time={max_run_time:g} is more than half of frequency={frequency:g}: the next "
            "window would open while rows of this one are still being started"
        )
    _check_concurrency(task, concurrency, max_concurrency)
    if run_type not in RUN_TYPES:
        raise ConfigurationError(
            f"window: unknown run_type={run_type!r}, expected one of {', '.join(RUN_TYPES)}."
            f"{did_you_mean(str(run_type), RUN_TYPES)}"
        )
    _expect(min_interval is None or _is_seconds(min_interval), "min_interval", min_interval, "seconds > 0, or None")
    _expect(name is None or (isinstance(name, str) and 0 < len(name) <= 190), "name", name, "1 to 190 characters")
    _expect(queue is None or isinstance(queue, str), "queue", queue, "the name of a queue, or None")
    definition = {
        "name": name,
        "task": task_name(task),
        "frequency": frequency,
        "max_run_time": max_run_time,
        "concurrency": concurrency,
        "max_concurrency": max_concurrency,
        "run_type": run_type,
        "queue": queue,
        "args": list(args),
        "kwargs": dict(kwargs or {}),
        "enabled": enabled,
        "continuous": continuous,
        "min_interval": min_interval,
    }
    return {
        "task": FIRE_TASK,
        "schedule": grid(frequency),
        "kwargs": {"window": definition},
        "options": {"queue": FIRE_QUEUE},
    }


def window_in(entry: Any) -> dict[str, Any] | None:
    """The definition that a beat entry carries, the very dict; None when the entry is no window."""
    fields = entry if isinstance(entry, Mapping) else getattr(entry, "__dict__", {})
    kwargs = fields.get("kwargs")
    if fields.get("task") != FIRE_TASK or not isinstance(kwargs, Mapping):
        return None
    definition = kwargs.get("window")
    return definition if isinstance(definition, dict) else None


@import_modules.connect(weak=False)
def name_windows(sender: Any, **_: Any) -> None:
    """Give each window without a name the key of its entry: stock Celery does not send the key.

    Celery sends this signal when an app's modules are imported, before any scheduler reads the entries.
    """
    for key, entry in dict(sender.conf.beat_schedule or {}).items():
        definition = window_in(entry)
        if definition is not None and definition["name"] is None:
            definition["name"] = str(key)


@beat_init.connect(weak=False)
def warn_of_fractions(sender: Any, **_: Any) -> None:
    """Say which windows a scheduler that keeps its entries in a database would round."""
    if type(sender.scheduler).__module__ in ("celery.beat", "celery_claim.beat"):
        return
    for key, entry in dict(sender.app.conf.beat_schedule or {}).items():
        definition = window_in(entry)
        if definition is not None and definition["frequency"] % 1:
            logger.warning(
                "window %s: frequency=%g is no whole number of seconds, and %s may hold only those; "
                "celery beat -S claim does not round",
                definition["name"] or key,
                definition["frequency"],
                type(sender.scheduler).__name__,
            )


def _check_concurrency(task: Any, concurrency: int, max_concurrency: int | None) -> None:
    for label, number in (("concurrency", concurrency), ("max_concurrency", max_concurrency)):
        if number is not None or label == "concurrency":
            _expect(type(number) is int and number >= 1, label, number, "a whole number >= 1")
    if max_concurrency is not None and concurrency > max_concurrency:
        raise ConfigurationError(f"window: concurrency={concurrency} is more than max_concurrency={max_concurrency}")
    cap = _cap_of(task)
    for label, number in (("concurrency", concurrency), ("max_concurrency", max_concurrency)):
        if number is not None and cap is not None and number > cap:
            raise ConfigurationError(f"window: {label}={number} is more than claim_max_concurrency={cap}")


def _cap_of(task: Any) -> int | None:
    """claim_max_concurrency of the task's app; None while the app has not read its configuration.

    Reading it here would freeze it: a lazy app is configured when somebody first needs it. The cap is looked at again
    when workers and beats start.
    """
    app = _app_of(task)
    if app is None or (not app.configured and (app._config_source or not hasattr(app, "_preconf"))):
        return None
    values = app.conf if app.configured else app._preconf
    cap = values.get("claim_max_concurrency", MAX_CONCURRENCY)
    return cap if type(cap) is int else None


def _app_of(task: Any) -> Any:
    try:
        return getattr(object.__getattribute__(task, "_Proxy__local"), "__self__", None)
    except AttributeError:
        pass
    if issubclass(type(task), str):
        from celery._state import get_current_app

        return get_current_app()
    return getattr(task, "app", None)


def task_name(task: Any) -> str:
    """The name of a task, without evaluating a lazy one: that would freeze its options before the app is configured."""
    if issubclass(type(task), str):  # isinstance() asks a lazy task for its class, and that makes it
        return str(task)
    try:
        arguments = object.__getattribute__(task, "_Proxy__args")
        named = object.__getattribute__(task, "_Proxy__kwargs")
        local = object.__getattribute__(task, "_Proxy__local")
    except AttributeError:
        name = getattr(task, "name", None)
        if not isinstance(name, str):
            raise ConfigurationError(f"window: task={task!r} is neither a task nor the name of one") from None
        return name
    function = arguments[0] if arguments else None
    app = getattr(local, "__self__", None)
    if named.get("name"):
        return str(named["name"])
    if function is None or app is None:
        return str(task.name)
    return str(app.gen_task_name(function.__name__, function.__module__))


def _expect(works: bool, name: str, value: Any, expected: str) -> None:
    if not works:
        raise ConfigurationError(f"window: {name}={value!r} does not work, expected {expected}")


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf and milliseconds(value) > 0
