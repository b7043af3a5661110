"""Medians and ratios of a run, and the page that shows them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .measurement import CORE, ORM, RAW, RAW_OFFSETS, SHALLOW, Case, Measurement

Find = Callable[[Case], list[float]]


@dataclass(frozen=True)
class Figures:
    """The measurements of a run by case, in the order of the rounds."""

    by_case: dict[Case, dict[int, dict[str, Any]]]

    @classmethod
    def of(cls, measurements: Iterable[Measurement]) -> Figures:
        by_case: dict[Case, dict[int, dict[str, Any]]] = {}
        for one in measurements:
            by_case.setdefault(one.case, {})[one.round] = one.facts
        return cls(by_case)

    def cases(self, part: str) -> list[Case]:
        return [case for case in self.by_case if case.part == part]

    def values(self, case: Case, name: str) -> list[float]:
        return [facts[name] for facts in self.by_case.get(case, {}).values() if name in facts]

    def median(self, case: Case, name: str) -> float | None:
        values = self.values(case, name)
        return statistics.median(values) if values else None

    def held(self, case: Case) -> str:
        """What the table of a depth case held."""
        return str(next(iter(self.by_case[case].values()))["held"])

    def ratio(self, case: Case, base: Case, name: str = "rows_per_second") -> Ratio | None:
        """The median of the ratios of the rounds: two figures are only ever compared within a round."""
        mine, other = self.by_case.get(case, {}), self.by_case.get(base, {})
        ratios = [mine[round_][name] / other[round_][name] for round_ in mine if round_ in other]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


@dataclass(frozen=True)
class Ratio:
    median: float
    least: float
    most: float

    def __str__(self) -> str:
        digits = 2 if self.median < 10 else 1
        return f"{self.median:.{digits}f} ({self.least:.{digits}f} – {self.most:.{digits}f})"


@dataclass(frozen=True)
class Bar:
    """A ratio that was promised, and what came out."""

    promise: str
    ratio: Ratio
    limit: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.ratio.median >= self.limit if self.at_least else self.ratio.median <= self.limit


def bars(figures: Figures) -> list[Bar]:
    """Every promise that this run has measured."""
    return [*_loop_bars(figures), *_peer_bars(figures), *_depth_bars(figures), *_lost_bars(figures)]


def baseline(case: Case) -> Case:
    """The bare loop of the same shape: with offsets where our consumers use them."""
    return case.like(RAW_OFFSETS if case.consumers > 1 and case.database == "mariadb" else RAW)


def _loop_bars(figures: Figures) -> Iterable[Bar]:
    for case in figures.cases("loop"):
        if case.what in (CORE, ORM) and case.database == "mariadb":
            ratio = figures.ratio(case, baseline(case))
            if ratio:
                promise = f"{case.what} / {baseline(case).what}: {_shape(case)}"
                yield Bar(promise, ratio, 0.85 if case.consumers == 1 else 0.9)


def _peer_bars(figures: Figures) -> Iterable[Bar]:
    for case in figures.cases("peers"):
        if case.what == CORE:
            continue
        for database in ("mariadb", "postgresql"):
            if database == "postgresql" and case.database != "postgresql":
                continue
            ours = Case("peers", database, CORE, 100, "batch", case.consumers)
            ratio = figures.ratio(ours, case)
            limit = {"mariadb": 1.5, "postgresql": 1.1}[database] if case.what == "pgqueuer" else 10
            if ratio:
                yield Bar(
                    f"ClaimTask on {NAMES[database]} / {case.what}: {_consumers(case)}",
                    ratio,
                    limit,
                )


def _depth_bars(figures: Figures) -> Iterable[Bar]:
    for case in figures.cases("depth"):
        if case.what != CORE or case.table == SHALLOW:
            continue
        shallow = Case("depth", case.database, CORE, case.batch, table=SHALLOW)
        ratio = figures.ratio(case, shallow, "ms")
        if ratio:
            promise = (
                f"Time of a claim of {case.batch} on {NAMES[case.database]}:"
                f" {figures.held(case)} / {figures.held(shallow)}"
            )
            yield Bar(promise, ratio, 1.15, at_least=False)


def _lost_bars(figures: Figures) -> Iterable[Bar]:
    for case in figures.cases("loop"):
        shares = figures.values(case, "lost_share")
        if case.what in (CORE, ORM) and case.consumers > 1 and case.database == "mariadb" and shares:
            ratio = Ratio(statistics.median(shares), min(shares), max(shares))
            yield Bar(f"Share of candidates lost, {case.what}: {_shape(case)}", ratio, 0.2, at_least=False)


# ---- the page ---------------------------------------------------------------------------------------------------

NAMES = {"mariadb": "MariaDB", "postgresql": "PostgreSQL"}

INTRODUCTION = """\
# Benchmarks

Written by `./dev bench rows`; run it to have the figures of your own machine.

A rate says as much about the machine as about the code, so what is judged here are ratios of two figures taken in
the same round: ClaimTask against the bare loop of statements, written with nothing but the database's driver, and
against other job queues. The rounds pass through all cases in turn, every second one backwards. A figure is the median
of the rounds, with the least and the greatest in brackets.

* **The bare loop** reads candidates, claims them with a token, reads the rows won, calls an empty function for each and
  writes back, by the same statements on the same table: no lease is renewed, no fault is handled, no clock is watched.
* **ClaimTask** is `drain()` of a task with an empty handler, for a `Table` and for an ORM model, with several consumers
  one process each.
* *row* and *batch* is how finished rows are written back: one statement a row (the default) or one for up to a
  hundred rows (`write_back="batch"`).
* **Other queues** run jobs of the same size that append one record to a file, from the first finished job to the last;
  their start is not counted. ClaimTask's handler there does the same.
"""


def page(conditions: dict[str, Any], figures: Figures) -> str:
    """The whole page, as Markdown."""
    parts = [INTRODUCTION, _conditions(conditions, figures), _bars_table(bars(figures))]
    for database in ("mariadb", "postgresql"):
        parts.append(_loop_table(figures, database))
    parts += [_peer_table(figures), _depth_table(figures)]
    return "\n".join(part for part in parts if part)


def _conditions(conditions: dict[str, Any], figures: Figures) -> str:
    servers = ", ".join(
        f"{NAMES[name]} {version.removeprefix('PostgreSQL ')}" for name, version in conditions["servers"].items()
    )
    packages = ", ".join(f"{name} {version}" for name, version in conditions["packages"].items())
    used = "; ".join(", ".join(requirements) for requirements in conditions["peers"].values())
    loads = [facts["load"] for case in figures.by_case for facts in figures.by_case[case].values() if "load" in facts]
    rounds = {len(by_round) for by_round in figures.by_case.values()}
    often = "–".join(str(number) for number in sorted({min(rounds), max(rounds)})) if rounds else "no"
    return "\n".join(
        (
            f"Measured on {conditions['date']}: {conditions['system']}, Python {conditions['python']}, {servers},",
            f"each commit flushed to disk, all on one machine; {packages}; {often} rounds.",
            f"Load average meanwhile: {statistics.median(loads):.1f}." if loads else "",
            f"Peers: {used}.\n",
        )
    )


def _bars_table(found: list[Bar]) -> str:
    if not found:
        return ""
    lines = ["## What is promised\n", "| ratio | promised | measured | |", "|---|---:|---:|---|"]
    for bar in found:
        sign = "≥" if bar.at_least else "≤"
        lines.append(f"| {bar.promise} | {sign} {bar.limit:g} | {bar.ratio} | {'met' if bar.met else 'not met'} |")
    return "\n".join(lines) + "\n"


def _loop_table(figures: Figures, database: str) -> str:
    cases = [case for case in figures.cases("loop") if case.database == database]
    if not cases:
        return ""
    lines = [
        f"## Claim loop on {NAMES[database]}\n",
        "CPU is the consumers' processor time a row, the database's own not counted.\n",
        "| batch | written back by | consumers | loop | rows/s | CPU µs a row | of the bare loop | candidates lost |",
        "|---:|---|---:|---|---:|---:|---:|---:|",
    ]
    for case in sorted(cases, key=lambda case: (case.batch, case.done, case.consumers)):
        ratio = figures.ratio(case, baseline(case)) if case != baseline(case) else None
        lost = figures.median(case, "lost_share")
        lines.append(
            f"| {case.batch} | {case.done} | {case.consumers} | {case.what} | {_rate(figures, case)}"
            f" | {figures.median(case, 'cpu_us'):.1f} | {ratio or '1'} | {'–' if lost is None else f'{lost:.0%}'} |"
        )
    return "\n".join(lines) + "\n"


def _peer_table(figures: Figures) -> str:
    cases = figures.cases("peers")
    if not cases:
        return ""
    lines = [
        "## Other job queues\n",
        "Jobs that do nothing. ClaimTask: batches of 100, batch write back.\n",
        "| queue | database | consumers | jobs/s | CPU µs a job | ClaimTask on MariaDB is | on PostgreSQL |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for case in sorted(cases, key=lambda case: (case.consumers, figures.median(case, "rows_per_second") or 0)):
        times = []
        for database in ("mariadb", "postgresql"):
            ours = Case("peers", database, CORE, 100, "batch", case.consumers)
            ratio = figures.ratio(ours, case) if case.what != CORE else None
            times.append(f"{ratio} x" if ratio else "–")
        name = "**ClaimTask**" if case.what == CORE else case.what
        lines.append(
            f"| {name} | {NAMES[case.database]} | {case.consumers} | {_rate(figures, case)}"
            f" | {figures.median(case, 'cpu_us'):.0f} | {times[0]} | {times[1]} |"
        )
    return "\n".join(lines) + "\n"


def _depth_table(figures: Figures) -> str:
    cases = figures.cases("depth")
    if not cases:
        return ""
    lines = [
        "## Depth\n",
        "Milliseconds for one claim: candidates, claim, and the rows won.\n",
        "| database | batch | table holds | bare statements | ClaimTask | of ClaimTask on the first table |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for case in cases:
        if case.what != CORE:
            continue
        bare, mine = figures.median(case.like(RAW), "ms"), figures.median(case, "ms")
        shallow = Case("depth", case.database, CORE, case.batch, table=SHALLOW)
        ratio = figures.ratio(case, shallow, "ms") if case != shallow else "1"
        lines.append(
            f"| {NAMES[case.database]} | {case.batch} | {figures.held(case)} | {'–' if bare is None else f'{bare:.2f}'}"
            f" | {mine:.2f} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def _rate(figures: Figures, case: Case) -> str:
    values = figures.values(case, "rows_per_second")
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} – {max(values):,.0f})"


def _shape(case: Case) -> str:
    return f"batches of {case.batch}, written back by {case.done}, {_consumers(case)}"


def _consumers(case: Case) -> str:
    return "1 consumer" if case.consumers == 1 else f"{case.consumers} consumers"
