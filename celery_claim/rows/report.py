"""What a run has done so far: counted for its result, told to the observer. Consumer and renewer both add to it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from celery_claim.claims.write_back import Outcome, WriteBack
from celery_claim.states import Status


@dataclass(frozen=True)
class Counts:
    """What one run, or one drain, did with how many rows."""

    claimed: int = 0
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    #: Given back without a verdict: not started, skipped, or interrupted.
    released: int = 0
    #: Not ours any more when their result was to be written.
    lost: int = 0
    #: Wall time of the run.
    seconds: float = 0.0


class Observer(Protocol):
    """Who hears of what happens to rows: the task sends signals and writes the log."""

    def claimed(self, rows: Mapping[Any, Any]) -> None: ...

    def ended(self, outcomes: Mapping[Any, Outcome]) -> None: ...

    def lost(self, keys: Sequence[Any]) -> None: ...


_COUNTED = {Status.SUCCEEDED: "succeeded", Status.FAILED: "failed", Status.RETRYING: "retried"}


class Report:
    """Counts of a run, and its observer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._counted: Counter[str] = Counter()

    @property
    def claimed_rows(self) -> int:
        return self._counted["claimed"]

    def claimed(self, rows: Mapping[Any, Any]) -> None:
        self._count("claimed", len(rows))
        self._observer.claimed(rows)

    def wrote(self, result: WriteBack) -> None:
        """Outcomes that are in the table now, and rows that turned out to be lost."""
        if result.written:
            with self._lock:
                self._counted.update(_COUNTED[outcome.status] for outcome in result.written.values())
            self._observer.ended(result.written)
        self.lost(result.lost)

    def released(self, rows: int, lost: Sequence[Any]) -> None:
        self._count("released", rows - len(lost))
        self.lost(lost)

    def lost(self, keys: Sequence[Any]) -> None:
        if keys:
            self._count("lost", len(keys))
            self._observer.lost(keys)

    def counts(self, seconds: float) -> Counts:
        with self._lock:
            return Counts(**self._counted, seconds=seconds)

    def _count(self, what: str, rows: int = 1) -> None:
        with self._lock:
            self._counted[what] += rows
