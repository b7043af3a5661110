"""What a window is: as declared in code, and as it stands in the table with what was changed at run time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_claim.exceptions import ConfigurationError, did_you_mean

RUN_TYPES = ("auto", "all", "main", "any")
#: The fields of a window in a beat entry. Those of later versions may be absent from an entry that is stored.
_REQUIRED = frozenset(
    (
        "name",
        "task",
        "frequency",
        "max_run_time",
        "concurrency",
        "max_concurrency",
        "run_type",
        "queue",
        "args",
        "kwargs",
        "enabled",
    )
)
_DECLARED = _REQUIRED | {"continuous", "min_interval"}


@dataclass(frozen=True)
class Definition:
    """A window as code declares it. Lengths of time are milliseconds."""

    name: str
    task: str
    frequency: int
    max_run_time: int
    concurrency: int = 1
    max_concurrency: int | None = None
    run_type: str = "auto"
    enabled: bool = True
    continuous: bool = False
    min_interval: int | None = None
    queue: str | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_entry(cls, name: str, declared: Mapping[str, Any]) -> Definition:
        """The definition that a beat entry carries; there, lengths of time are seconds.

        Raises ConfigurationError for what window() does not make: whoever writes messages by hand gets no further.
        """
        unknown = sorted(declared.keys() - _DECLARED)
        missing = sorted(_REQUIRED - declared.keys())
        if unknown or missing:
            hint = did_you_mean(unknown[0], _DECLARED) if unknown else ""
            what = f"unknown fields {', '.join(unknown)}" if unknown else f"no {', '.join(missing)}"
            raise ConfigurationError(f"window {name}: {what}.{hint} Declare it with celery_claim.window()")
        interval = declared.get("min_interval")
        return cls(
            name=name,
            task=declared["task"],
            frequency=milliseconds(declared["frequency"]),
            max_run_time=milliseconds(declared["max_run_time"]),
            concurrency=declared["concurrency"],
            max_concurrency=declared["max_concurrency"],
            run_type=declared["run_type"],
            enabled=declared["enabled"],
            continuous=declared.get("continuous", False),
            min_interval=None if interval is None else milliseconds(interval),
            queue=declared["queue"],
            args=declared["args"],
            kwargs=declared["kwargs"],
        )

    @property
    def columns(self) -> dict[str, Any]:
        """Its columns in the table of windows."""
        message = {"args": list(self.args), "kwargs": dict(self.kwargs), "queue": self.queue}
        return {
            "task": self.task,
            "frequency": self.frequency,
            "max_run_time": self.max_run_time,
            "concurrency": self.concurrency,
            "max_concurrency": self.max_concurrency,
            "run_type": self.run_type,
            "enabled": self.enabled,
            "continuous": self.continuous,
            "min_interval": self.min_interval,
            "message": json.dumps(message, sort_keys=True),
        }


@dataclass(frozen=True)
class Window:
    """A row of the table of windows; every value is the one in force."""

    definition: Definition
    frequency: int
    max_run_time: int
    concurrency: int
    enabled: bool
    #: Which of the above were changed at run time.
    overridden: frozenset[str]
    last_slot_start: int
    active_until: int | None
    fire_seq: int
    triggered_by: str | None
    triggered_at: int | None

    @classmethod
    def from_row(cls, row: Any, cap: int) -> Window:
        """`cap`: claim_max_concurrency."""
        message = json.loads(row["message"])
        definition = Definition(
            name=row["name"],
            task=row["task"],
            frequency=row["frequency"],
            max_run_time=row["max_run_time"],
            concurrency=row["concurrency"],
            max_concurrency=row["max_concurrency"],
            run_type=row["run_type"],
            enabled=bool(row["enabled"]),
            continuous=bool(row["continuous"]),
            min_interval=row["min_interval"],
            queue=message["queue"],
            args=message["args"],
            kwargs=message["kwargs"],
        )
        changed = {
            name: row[f"{name}_override"]
            for name in ("frequency", "max_run_time", "concurrency", "enabled")
            if row[f"{name}_override"] is not None
        }
        concurrency = changed.get("concurrency", definition.concurrency)
        return cls(
            definition=definition,
            frequency=changed.get("frequency", definition.frequency),
            max_run_time=changed.get("max_run_time", definition.max_run_time),
            concurrency=max(0, min(concurrency, cap, definition.max_concurrency or cap)),
            enabled=bool(changed.get("enabled", definition.enabled)),
            overridden=frozenset(changed),
            last_slot_start=row["last_slot_start"],
            active_until=row["active_until"],
            fire_seq=row["fire_seq"],
            triggered_by=row["triggered_by"],
            triggered_at=row["triggered_at"],
        )

    @classmethod
    def unfired(cls, definition: Definition, cap: int) -> Window:
        """A window that code declares and the table does not have yet."""
        return cls(
            definition=definition,
            frequency=definition.frequency,
            max_run_time=definition.max_run_time,
            concurrency=min(definition.concurrency, cap),
            enabled=definition.enabled,
            overridden=frozenset(),
            last_slot_start=0,
            active_until=None,
            fire_seq=0,
            triggered_by=None,
            triggered_at=None,
        )

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def task(self) -> str:
        return self.definition.task

    @property
    def run_type(self) -> str:
        return self.definition.run_type

    def facts(self, now: int) -> dict[str, Any]:
        """The window for a listing: lengths of time in seconds, instants in milliseconds since 1970."""
        slot = now - now % self.frequency
        interval = self.definition.min_interval
        return {
            "name": self.name,
            "task": self.task,
            "run_type": self.run_type,
            "frequency": self.frequency / 1000,
            "max_run_time": self.max_run_time / 1000,
            "concurrency": self.concurrency,
            "max_concurrency": self.definition.max_concurrency,
            "enabled": self.enabled,
            "continuous": self.definition.continuous,
            "min_interval": None if interval is None else interval / 1000,
            "queue": self.definition.queue,
            "overridden": sorted(self.overridden),
            "active": self.active_until is not None and self.active_until > now,
            "active_until": self.active_until,
            "last_slot_start": self.last_slot_start or None,
            "next_slot_start": slot + self.frequency if self.enabled else None,
            "fire_seq": self.fire_seq,
            "triggered_by": self.triggered_by,
            "triggered_at": self.triggered_at,
        }


def milliseconds(seconds: float) -> int:
    """Whole milliseconds, as all lengths of time are stored."""
    return round(seconds * 1000)
