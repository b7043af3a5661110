"""Open windows: exactly one caller of any number wins a slot, and its runs are in the table before any message is.

::

    lock the windows -> which are due -> where their runs go -> a new slot, a new number -> runs (commit) -> messages

Everything up to the commit is one transaction. A crash before it leaves nothing, and the next caller fires the slot. A
crash after it leaves runs whose messages are not out (published_at is null): the maintenance of any worker sends them.
A commit whose answer is lost is one or the other; a trigger, whose caller waits for the answer, looks which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from celery_claim.database import Link, persistently
from celery_claim.exceptions import ClaimError, DatabaseUnavailable
from celery_claim.nodes.sql.tables import NAME_LENGTH
from celery_claim.windows.place import Field, Place
from celery_claim.windows.slots import is_fired, is_occupied, missed_slots, slot_start, start_before
from celery_claim.windows.sql.statements import WindowStatements
from celery_claim.windows.window import Window

#: Seconds in which a trigger that got no answer to its commit tries to find out whether it was done.
ANSWER_SECONDS = 5.0


class Outcome(Enum):
    """What became of the wish to open a window."""

    FIRED = "fired"
    #: The slot was fired before, by us or another.
    NOT_DUE = "not_due"
    #: Consumers of an earlier fire still have their time.
    OCCUPIED = "occupied"
    #: Every consumer is still at a row of an earlier fire.
    BUSY = "busy"
    PAUSED = "paused"
    #: No live node takes such a run.
    NO_NODE = "no_node"
    #: Triggered again before min_interval was over.
    TOO_SOON = "too_soon"
    #: Nobody has written this window into the table.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Run:
    """One consumer of one fire, as its message names it."""

    window: Window
    fire_seq: int
    node: str
    consumer_id: int
    ordinal: int
    consumers: int
    attempt: int = 1

    @property
    def task_id(self) -> str:
        """Tells a second delivery at a glance, in Flower too."""
        return f"claim-{self.window.name}-{self.fire_seq}-{self.node or 'any'}-{self.consumer_id}-{self.attempt}"

    @property
    def message(self) -> dict[str, Any]:
        """What the task gets as `claim`."""
        return {
            "window": self.window.name,
            "fire_seq": self.fire_seq,
            "node": self.node,
            "consumer_id": self.consumer_id,
            "attempt": self.attempt,
            "ordinal": self.ordinal,
            "consumers": self.consumers,
            "max_run_time": self.window.max_run_time / 1000,
        }


@dataclass
class Fires:
    """What became of each window, and the runs whose messages are to be sent now."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    #: Window -> why no node could be chosen.
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """What an app's settings say about firing."""

    #: claim_max_concurrency
    cap: int
    #: claim_node_timeout in milliseconds
    node_timeout: int
    #: claim_main_node
    main_node: str | None = None
    #: claim_log_empty_runs
    log_empty_runs: bool = True
    #: The queue whose consumers a window is meant for.
    queue_of: Callable[[Window], str | None] = lambda window: None


#: Longest text in a row of the history.
ERROR_LENGTH = 2000


def fire(
    link: Link, statements: WindowStatements, names: Sequence[str], rules: Rules, *, patient: bool = False
) -> Fires:
    """Fire those of the windows whose slot has not been fired.

    `patient`: a window for whose runs there is no node just now is left as it is, to be tried again; else its slot
    passes as missed.
    """
    fires = Fires(dict.fromkeys(names, Outcome.UNKNOWN))
    with link.transaction():
        windows, now = lock(link, statements, names, rules)
        due = _due(windows, now, fires)
        if due:
            seen = read_field(link, statements, rules)
            # The first look at the clock was before the wait for the locks.
            _open(link, statements, _due(due, seen.now, fires), seen, rules, fires, patient=patient)
    return fires


def trigger(link: Link, statements: WindowStatements, name: str, rules: Rules, *, by: str) -> Fires:
    """Open one window now, whatever the time; of any number of callers one wins, until its consumers are done.

    `by` goes into the history. The grid of slots is not touched. Raises DatabaseUnavailable; it says so when the window
    may have been opened all the same.
    """
    fires = Fires({name: Outcome.UNKNOWN})
    mark: dict[str, Any] = {"window_name": name, "by": by[:NAME_LENGTH]}
    try:
        with link.transaction():
            windows, _ = lock(link, statements, [name], rules)
            for window in windows:
                seen = read_field(link, statements, rules)
                fires.outcomes[name] = _whether_free(window, seen.now)
                if fires.outcomes[name] is not Outcome.FIRED:
                    break
                chosen = seen.places(window, rules.queue_of(window))
                if isinstance(chosen, str):
                    fires.outcomes[name], fires.reasons[name] = Outcome.NO_NODE, chosen
                elif not chosen[1]:
                    fires.outcomes[name] = Outcome.BUSY
                else:
                    mark["at"] = seen.now
                    link.execute(statements.mark_triggered, mark)
                    fires.runs = runs_at(window, window.fire_seq + 1, *chosen)
                    rows = [run_row(run, seen.now, "manual", by=mark["by"]) for run in fires.runs]
                    link.execute(statements.add_runs, rows)
    except DatabaseUnavailable as error:
        # The answer to the commit may be what is lost. Then we won, and a second try would say that another did.
        if not fires.runs or not _is_opened(link, statements, mark, rules, error):
            raise
    return fires


def _is_opened(
    link: Link, statements: WindowStatements, mark: Mapping[str, Any], rules: Rules, error: DatabaseUnavailable
) -> bool:
    """Whether a trigger is in the table whose transaction ended with an error."""

    def look() -> bool:
        # Locked: if the transaction is still open on the server, this waits for its end.
        with link.transaction():
            windows, _ = lock(link, statements, [mark["window_name"]], rules)
        return any((window.triggered_at, window.triggered_by) == (mark["at"], mark["by"]) for window in windows)

    try:
        return persistently(look, until=time.monotonic() + ANSWER_SECONDS)
    except ClaimError:
        raise DatabaseUnavailable(f"{error}; whether window {mark['window_name']} was opened is not known") from error


def lock(link: Link, statements: WindowStatements, names: Iterable[str], rules: Rules) -> tuple[list[Window], int]:
    """The windows, locked until the end of the transaction, and the database's clock before the wait for the locks."""
    rows = link.execute(statements.lock_windows, {"names": sorted(names)}).mappings().all()
    return [Window.from_row(row, rules.cap) for row in rows], rows[0]["now"] if rows else 0


def read_field(link: Link, statements: WindowStatements, rules: Rules) -> Field:
    """Where runs can go and where they are, just now."""
    rows = link.execute(statements.field, {"node_timeout": rules.node_timeout}).all()
    return Field.from_rows(rows, main_node=rules.main_node)


def runs_at(
    window: Window,
    fire_seq: int,
    consumers: int,
    places: Iterable[Place],
    attempts: Mapping[tuple[str, int], int] | None = None,
) -> list[Run]:
    """A run for each place; `attempts`: how many runs the fire has had there already."""
    before = attempts or {}
    return [
        Run(
            window=window,
            fire_seq=fire_seq,
            node=place.node,
            consumer_id=place.consumer_id,
            ordinal=place.ordinal,
            consumers=consumers,
            attempt=before.get((place.node, place.consumer_id), 0) + 1,
        )
        for place in places
    ]


def run_row(run: Run, now: int, kind: str, *, by: str | None = None) -> dict[str, Any]:
    """A waiting run as a row of its table."""
    return {
        **_row(run.window, run.fire_seq, slot_start(now, run.window.frequency), now, kind, by),
        "node": run.node,
        "consumer_id": run.consumer_id,
        "ordinal": run.ordinal,
        "consumers": run.consumers,
        "attempt": run.attempt,
        "state": "pending",
        "task_id": run.task_id,
    }


def _due(windows: Iterable[Window], now: int, fires: Fires) -> list[Window]:
    due = []
    for window in windows:
        fires.outcomes[window.name] = _whether_due(window, now)
        if fires.outcomes[window.name] is Outcome.FIRED:
            due.append(window)
    return due


def _whether_due(window: Window, now: int) -> Outcome:
    if not window.enabled:
        return Outcome.PAUSED
    if is_fired(window, now):
        return Outcome.NOT_DUE
    return Outcome.OCCUPIED if is_occupied(window, now) else Outcome.FIRED


def _whether_free(window: Window, now: int) -> Outcome:
    if not window.enabled:
        return Outcome.PAUSED
    if is_occupied(window, now):
        return Outcome.OCCUPIED
    interval = window.definition.min_interval
    if interval is not None and window.triggered_at is not None and window.triggered_at > now - interval:
        return Outcome.TOO_SOON
    return Outcome.FIRED


def _open(
    link: Link,
    statements: WindowStatements,
    due: Sequence[Window],
    seen: Field,
    rules: Rules,
    fires: Fires,
    *,
    patient: bool,
) -> None:
    now = seen.now
    manned: list[str] = []
    unmanned: list[str] = []
    rows: list[dict[str, Any]] = []
    for window in due:
        chosen = seen.places(window, rules.queue_of(window))
        if isinstance(chosen, str):
            fires.outcomes[window.name], fires.reasons[window.name] = Outcome.NO_NODE, chosen
            if patient:
                continue
            unmanned.append(window.name)
            rows.append(event_row(window, now, "missed", chosen))
        elif not chosen[1]:
            fires.outcomes[window.name] = Outcome.BUSY
            unmanned.append(window.name)
            rows.append(event_row(window, now, "skipped", "every consumer is still at a row of an earlier fire"))
        else:
            manned.append(window.name)
            runs = runs_at(window, window.fire_seq + 1, *chosen)
            fires.runs += runs
            rows += [run_row(run, now, "scheduled") for run in runs]
        rows += _missed_before(window, now)
    for statement, names in ((statements.mark_fired, manned), (statements.mark_unmanned, unmanned)):
        if names:
            link.execute(statement, {"names": names, "at": now})
    if rows:
        link.execute(statements.add_runs, [_filled(row) for row in rows])


def event_row(window: Window, now: int, state: str, text: str, *, slot: int | None = None) -> dict[str, Any]:
    """A row of the history that tells of a slot without a run."""
    start = slot_start(now, window.frequency) if slot is None else slot
    return {
        **_row(window, window.fire_seq + 1, start, now, "scheduled", None),
        "state": state,
        "finished_at": now,
        "error": text[:ERROR_LENGTH],
    }


def _missed_before(window: Window, now: int) -> list[dict[str, Any]]:
    missed = missed_slots(window, now)
    if not missed:
        return []
    first, last = missed
    count = (last - first) // window.frequency + 1
    text = f"{count} slots, {first} to {last}, passed without a fire: no beat was there, or no database"
    return [event_row(window, now, "missed", text if count > 1 else text.replace("1 slots", "1 slot"), slot=first)]


def _row(window: Window, fire_seq: int, start: int, now: int, kind: str, by: str | None) -> dict[str, Any]:
    return {
        "window": window.name,
        "fire_seq": fire_seq,
        "slot_start": start,
        "kind": kind,
        "triggered_by": by,
        "start_before": start_before(window, now),
        "max_run_time": window.max_run_time,
        "created_at": now,
    }


def _filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with every column that any row of one INSERT has."""
    rest = dict.fromkeys(("consumer_id", "ordinal", "consumers", "attempt", "task_id", "finished_at", "error"))
    return {"node": "", **rest, **row}
