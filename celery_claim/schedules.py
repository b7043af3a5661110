"""`window(...)`: an entry of beat_schedule that keeps consumers of a task at work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery.schedules import schedule

from celery_claim.exceptions import ConfigurationError, did_you_mean

#: The task that opens windows, and the queue it travels on; every armed worker consumes it whatever its -Q says.
FIRE_TASK = "celery_claim.fire"
FIRE_QUEUE = "celery_claim"

RUN_TYPES = ("auto", "any")


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
) -> dict[str, Any]:
    """A beat entry: every `frequency` seconds, `concurrency` consumers of the task start rows for `max_run_time`.

    `task` is a task, which is not evaluated if it is lazy, or a task's name. `max_run_time` is half the frequency by
    default and at most. The entry works under every scheduler that knows plain intervals. Raises ConfigurationError
    (an ImproperlyConfigured) for values that cannot work.
    """
    _expect(_is_seconds(frequency), "frequency", frequency, "seconds > 0")
    max_run_time = frequency / 2 if max_run_time is None else max_run_time
    _expect(_is_seconds(max_run_time), "max_run_time", max_run_time, "seconds > 0")
    if max_run_time > frequency / 2:
        raise ConfigurationError(
            f"window: max_run_time={max_run_time:g} is more than half of frequency={frequency:g}: the next "
            "window would open while rows of this one are still being started"
        )
    for label, number in (("concurrency", concurrency), ("max_concurrency", max_concurrency)):
        if number is not None:
            _expect(type(number) is int and number >= 1, label, number, "a whole number >= 1")
    if max_concurrency is not None and concurrency > max_concurrency:
        raise ConfigurationError(f"window: concurrency={concurrency} is more than max_concurrency={max_concurrency}")
    if run_type not in RUN_TYPES:
        raise ConfigurationError(
            f"window: unknown run_type={run_type!r}, expected one of {', '.join(RUN_TYPES)}."
            f"{did_you_mean(str(run_type), RUN_TYPES)}"
        )
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
    }
    return {
        "task": FIRE_TASK,
        "schedule": schedule(frequency),
        "kwargs": {"window": definition},
        "options": {"queue": FIRE_QUEUE},
    }


def task_name(task: Any) -> str:
    """The name of a task, without evaluating a lazy one: that would freeze its options before the app is configured."""
    if isinstance(task, str):
        return task
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
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
