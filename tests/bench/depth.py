"""How long one claim takes while the table grows: at the head of few or many rows, and behind what is done."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import claim_task, raw, table
from .crew import Seat
from .measurement import RAW, SHALLOW, Case
from .model import twin


@dataclass(frozen=True)
class Held:
    """What a table holds before the first claim."""

    pending: int
    finished: int = 0
    delayed: int = 0

    def __str__(self) -> str:
        parts = ((self.finished, "finished"), (self.delayed, "delayed"), (self.pending, "pending"))
        return ", ".join(f"{rows:,} {what}" for rows, what in parts if rows)


TABLES = {
    SHALLOW: Held(10_000),
    "deep": Held(1_000_000),
    "behind finished": Held(10_000, finished=1_000_000),
    "with delayed": Held(10_000, delayed=100_000),
}
QUICK_TABLES = {
    SHALLOW: Held(2_000),
    "deep": Held(20_000),
    "behind finished": Held(2_000, finished=20_000),
    "with delayed": Held(2_000, delayed=2_000),
}

SUCCEEDED, RETRYING = 2, 5
#: When the delayed rows are due: not within this measurement.
FAR_AWAY = 4_000_000_000


class Depth:
    """The tables of one database, and claims timed on all of them in turn."""

    def __init__(self, url: str, quick: bool) -> None:
        self.url = url
        self.claims = 5 if quick else 40
        self.held = QUICK_TABLES if quick else TABLES
        self.tables = {name: twin(f"claim_depth_{number}") for number, name in enumerate(self.held)}
        for name, held in self.held.items():
            mine = self.tables[name]
            table.create(url, mine)
            # In front of the pending rows by key, which is where a walk by the primary key would meet them.
            table.fill(url, mine, held.finished, status=SUCCEEDED)
            table.fill(url, mine, held.delayed, status=RETRYING, next_retry_time=FAR_AWAY)
            table.fill(url, mine, held.pending)

    def measure(self, cases: list[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
        """The median time of a claim for each case; one claim of each follows one of the others."""
        claimers = {case: self._claimer(case) for case in cases}
        seconds: dict[Case, list[float]] = {case: [] for case in cases}
        for claim in claimers.values():
            claim()  # the first one connects and prepares
        for _ in range(self.claims):
            for case, claim in claimers.items():
                began = time.perf_counter()
                won = claim()
                seconds[case].append(time.perf_counter() - began)
                if won != case.batch:
                    raise RuntimeError(f"{case}: {won} rows won")
        for case in cases:
            milliseconds = {"ms": statistics.median(seconds[case]) * 1000, "ms_max": max(seconds[case]) * 1000}
            yield case, {**milliseconds, "held": str(self.held[case.table])}
        for name, mine in self.tables.items():
            claimed = sum(case.batch * (self.claims + 1) for case in cases if case.table == name)
            table.fill(self.url, mine, claimed)  # as many pending rows again for the next round

    def drop(self) -> None:
        for mine in self.tables.values():
            table.drop(self.url, mine)

    def _claimer(self, case: Case) -> Callable[[], int]:
        mine = self.tables[case.table]
        if case.what == RAW:
            connected = raw.connect(self.url, mine.name, Seat(0, 1))
            return lambda: len(connected.claim(case.batch, 0)[2])
        return claim_task.claimer(self.url, mine, case.batch)
