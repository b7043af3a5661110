"""prove: what the tables say after the run, and what they would have to say."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from sqlalchemy import Engine, select

from celery_claim import Status
from celery_claim.demo.kill import Killed
from celery_claim.demo.load import python
from celery_claim.demo.measure import measure
from celery_claim.demo.tables import File, Handling


@dataclass(frozen=True)
class Pace:
    """How long the work took."""

    rows: int
    #: Seconds from the first handled row to the end of the last row.
    seconds: float
    #: Seconds until the last row of the killed worker had ended, from the kill.
    seconds_until_back: float | None = None


@dataclass(frozen=True)
class Proof:
    """What was found in the two tables, compared with the files themselves."""

    rows: int
    files: int
    #: Ids of rows that did not end as SUCCEEDED, or that no handler stored a result for.
    not_succeeded: tuple[int, ...]
    not_handled: tuple[int, ...]
    once: int
    #: Ids of rows handled again although no lease of theirs had run out: this must not happen.
    again_without_cause: tuple[int, ...]
    #: Ids of rows handled again after a worker had lost them, and all rows that were given back so.
    again: tuple[int, ...]
    reclaimed: tuple[int, ...]
    #: Results that differ from the hash and line count computed here and now.
    compared: int
    different: int
    killed: Killed | None
    kill_wanted: bool

    @property
    def killed_not_back(self) -> tuple[int, ...]:
        """Rows of the killed worker that were not given back and finished by another."""
        held = self.killed.rows if self.killed else frozenset()
        return tuple(sorted(held - set(self.reclaimed) | held & set(self.not_succeeded)))

    @property
    def broken(self) -> list[str]:
        """Why the proof does not hold; empty when it does."""
        reasons = {
            "rows did not succeed": self.not_succeeded,
            "rows were never handled": self.not_handled,
            "rows were handled twice without a cause": self.again_without_cause,
            "rows of the killed worker did not come back": self.killed_not_back,
        }
        found = [f"{len(ids):,} {reason}: id {_some(ids)}" for reason, ids in reasons.items() if ids]
        if self.different:
            found.append(f"{self.different:,} results differ from the files")
        if self.kill_wanted and self.killed is None:
            found.append("no worker was killed: the rows were handled before one could be hit; try more --rows")
        return found


def prove(engine: Engine, *, killed: Killed | None, kill_wanted: bool) -> Proof:
    """Compare every row with its results, and every result with its file."""
    with engine.connect() as connection:
        files = connection.execute(select(File.id, File.path, File.status, File.reclaim_count)).all()
        handlings = connection.execute(select(Handling.file_id, Handling.sha256, Handling.lines)).all()
    results: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for file_id, sha256, lines in handlings:
        results[file_id].append((sha256, lines))
    measured = cache(measure)
    again = [file for file in files if len(results[file.id]) > 1]
    return Proof(
        rows=len(files),
        files=len({file.path for file in files}),
        not_succeeded=tuple(file.id for file in files if file.status != Status.SUCCEEDED),
        not_handled=tuple(file.id for file in files if not results[file.id]),
        once=sum(len(results[file.id]) == 1 for file in files),
        again_without_cause=tuple(file.id for file in again if len(results[file.id]) > 1 + file.reclaim_count),
        again=tuple(file.id for file in again if len(results[file.id]) <= 1 + file.reclaim_count),
        reclaimed=tuple(file.id for file in files if file.reclaim_count),
        compared=len(handlings),
        different=sum(result != measured(file.path) for file in files for result in results[file.id]),
        killed=killed,
        kill_wanted=kill_wanted,
    )


def report(proof: Proof, pace: Pace) -> RenderableType:
    """The proof as a table and a verdict, for people."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("rows", _rows(proof))
    table.add_row("handled once", f"{proof.once:,}")
    table.add_row("handled twice", _twice(proof))
    table.add_row("twice, no cause", f"{len(proof.again_without_cause):,}")
    table.add_row("never handled", f"{len(proof.not_handled):,}")
    table.add_row(
        "hashes",
        f"{proof.compared:,} compared with ones computed here, {proof.different:,} differ",
    )
    if proof.killed:
        table.add_row("killed", _killed(proof.killed, proof.rows))
        table.add_row("came back", _came_back(proof, proof.killed, pace))
    if others := set(proof.reclaimed) - (proof.killed.rows if proof.killed else set()):
        table.add_row(
            "other leases",
            f"{len(others):,} rows were given back because their worker was too slow to renew",
        )
    rate = pace.rows / pace.seconds if pace.seconds else 0
    waited = ", the wait for the killed rows' lease included" if proof.killed else ""
    table.add_row("pace", f"{pace.rows:,} rows in {pace.seconds:.1f} s, {rate:,.0f} rows/s{waited}")
    return Padding(Group(table, Text(), _verdict(proof)), (1, 2), expand=False)


def _rows(proof: Proof) -> str:
    kind = "one per file" if proof.files == proof.rows else f"for {proof.files:,} files"
    return f"{proof.rows:,}, {kind} of the standard library of {python()}"


def _twice(proof: Proof) -> str:
    if not proof.again:
        return "0"
    held = proof.killed.rows if proof.killed else frozenset()
    by_kill = len(held.intersection(proof.again))
    by_others = len(proof.again) - by_kill
    causes = []
    if by_kill:
        causes.append(f"{by_kill:,} stored by the killed worker, which died before it wrote the row back")
    if by_others:
        causes.append(f"{by_others:,} after a lease that a slow worker did not renew in time")
    return "; ".join(causes)


def _killed(killed: Killed, rows: int) -> str:
    return (
        f"{killed.worker}, process {killed.pid}, with kill -9 after {killed.seconds:.1f} s: {killed.ended:,} of "
        f"{rows:,} rows had ended, it held {len(killed.rows):,}"
    )


def _came_back(proof: Proof, killed: Killed, pace: Pace) -> str:
    back = len(killed.rows) - len(proof.killed_not_back)
    after = f", the last of them finished {pace.seconds_until_back:.1f} s later" if pace.seconds_until_back else ""
    return f"{back:,} of {len(killed.rows):,}, each with a reclaim_count of 1 or more{after}"


def _verdict(proof: Proof) -> Text:
    if proof.broken:
        return Text(
            "The proof does not hold: " + "; ".join(proof.broken) + ".",
            style="bold red",
        )
    return Text("Every row was handled, and none twice without a cause.", style="bold green")


def _some(ids: tuple[int, ...]) -> str:
    shown = ", ".join(str(each) for each in ids[:5])
    return shown + (", ..." if len(ids) > 5 else "")
