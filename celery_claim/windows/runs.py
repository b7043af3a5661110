"""A run: started by one delivery of its message, kept by a lease, ended with what it did, perhaps with a successor.

The row is the truth, not the message. A kill -9 at any point leaves a row that its times put right: one that is
pending is missed after start_before, one that is running is free again after lease_until.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from celery_claim.database import Link
from celery_claim.windows.fire import ERROR_LENGTH, Rules, Run, lock, read_field, run_row
from celery_claim.windows.sql.statements import WindowStatements
from celery_claim.windows.sql.tables import COUNTS
from celery_claim.windows.window import Window

logger = logging.getLogger(__name__)

#: Seconds between two looks at what may end a run before its time.
WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class Started:
    """A run that is ours."""

    id: int
    token: str
    window: str
    fire_seq: int
    node: str
    consumer_id: int
    attempt: int
    ordinal: int
    consumers: int
    #: Milliseconds for which it may start rows.
    left: int


@dataclass(frozen=True)
class End:
    """What became of a run."""

    #: "done", "empty" (no row was there), "timeout" (its time was over first), "error".
    state: str
    counts: Mapping[str, Any]
    error: str | None = None
    #: Its time was over and rows are left: a continuous window goes on at once.
    unfinished: bool = False


def start(
    link: Link, statements: WindowStatements, message: Mapping[str, Any], *, node: str, boot_id: str, node_timeout: int
) -> Started | None:
    """Take the run that a message names; None when it is another's, was moved, or came too late.

    Crash after it: the run is running and nobody renews it; it counts as lost after claim_node_timeout.
    """
    token = uuid4().hex
    place = {
        "of_window": message["window"],
        "fire": message["fire_seq"],
        "consumer": message["consumer_id"],
        "number": message["attempt"],
    }
    addressed = {**place, "to_node": message["node"]}
    owner = {"by_node": node, "boot": boot_id, "by_token": token, "by_pid": os.getpid(), "timeout": node_timeout}
    link.send(statements.start, {**addressed, **owner})
    # Whether it was changed is read, not counted: the answer to the first try may be lost, and the second changes
    # nothing.
    row = link.send(statements.started, {**place, "by_token": token}).mappings().first()
    if row is None:
        if link.send(statements.miss, addressed).rowcount:
            logger.warning("window %s: consumer %s came too late to start", message["window"], message["consumer_id"])
        return None
    return Started(
        id=row["id"],
        token=token,
        window=message["window"],
        fire_seq=message["fire_seq"],
        node=node,
        consumer_id=message["consumer_id"],
        attempt=message["attempt"],
        ordinal=row["ordinal"],
        consumers=row["consumers"],
        left=row["left"],
    )


def end(link: Link, statements: WindowStatements, run: Started, ended: End, rules: Rules) -> list[Run] | None:
    """Write what became of a run; returns its successors (one or none), or None when others had given it up.

    The successor of an unfinished run of a continuous window is inserted by the same transaction: a crash leaves both
    or neither, and never two consumers of one number.
    """
    with link.transaction():
        windows, now = lock(link, statements, [run.window], rules)
        counts = {f"n_{name}": ended.counts.get(name, 0) for name in COUNTS}
        text = ended.error[:ERROR_LENGTH] if ended.error else None
        ours = {"run_id": run.id, "by_token": run.token}
        if ended.state == "empty" and not rules.log_empty_runs:
            changed = link.execute(statements.drop_own, ours)
        else:
            changed = link.execute(statements.end, {**ours, **counts, "ended": ended.state, "text": text})
        if not changed.rowcount:
            # Given up by others; or a second try, after the answer to the first one's commit was lost. Then its
            # successor, if any, is in the table and is sent by the maintenance.
            return [] if link.execute(statements.ended_as, ours).scalar() == ended.state else None
        successors = [_successor(run, window) for window in windows if ended.unfinished and _goes_on(run, window)]
        if successors and read_field(link, statements, rules).is_busy(windows[0], run.node, run.consumer_id):
            # Our lease was over and a later fire has filled our place, before any maintenance marked us as lost.
            successors = []
        if successors:
            link.execute(statements.add_runs, [run_row(each, now, "chained") for each in successors])
        link.execute(statements.free_window, {"window_name": run.window, "fire": run.fire_seq})
    return successors


def _goes_on(run: Started, window: Window) -> bool:
    return window.definition.continuous and may_go_on(window, run.consumer_id)


def may_go_on(window: Window, consumer_id: int) -> bool:
    """Whether a consumer of this number is still wanted."""
    return window.enabled and consumer_id < window.concurrency


def _successor(run: Started, window: Window) -> Run:
    return Run(
        window=window,
        fire_seq=run.fire_seq,
        node="" if window.run_type == "any" else run.node,
        consumer_id=run.consumer_id,
        ordinal=run.ordinal,
        consumers=run.consumers,
        attempt=run.attempt + 1,
    )


class RunLease:
    """What keeps a run ours while its consumer is at work: looked after by the renewer's thread."""

    def __init__(self, statements: WindowStatements, run: Started, rules: Rules, *, heartbeat: float) -> None:
        """`heartbeat`: seconds between two renewals."""
        self._statements = statements
        self._run = run
        self._rules = rules
        self._heartbeat = heartbeat
        self._renewed_at = self._watched_at = time.monotonic()
        self._not_before = 0.0
        self._over = threading.Event()
        #: The run is not ours any more: it was lost, or marked so.
        self.lost = False

    @property
    def name(self) -> str:
        return f"the run of window {self._run.window}, consumer {self._run.consumer_id}"

    @property
    def over(self) -> bool:
        """Whether no further row may be started: the run is lost, the window paused, or the consumer one too many."""
        return self._over.is_set()

    def due(self) -> float:
        """time.monotonic() at which to look after it again."""
        return max(self._not_before, min(self._renewed_at + self._heartbeat, self._watched_at + WATCH_SECONDS))

    def pause(self) -> None:
        """The last try failed; the next is not at once."""
        self._not_before = time.monotonic() + WATCH_SECONDS

    def keep(self, link: Link) -> None:
        """Renew the lease when it is time, and see whether the consumer is still wanted."""
        now = time.monotonic()
        if now >= self._renewed_at + self._heartbeat:
            self._renew(link)
            self._renewed_at = now
        row = link.send(self._statements.bounds, {"name": self._run.window}).mappings().first()
        self._watched_at = now
        if row is not None and not may_go_on(Window.from_row(row, self._rules.cap), self._run.consumer_id):
            self._over.set()

    def _renew(self, link: Link) -> None:
        ours = {"run_id": self._run.id, "by_token": self._run.token}
        renewed = link.send(self._statements.renew, {**ours, "timeout": self._rules.node_timeout})
        if not renewed.rowcount and link.send(self._statements.still_ours, ours).first() is None and not self.lost:
            self.lost = True
            self._over.set()
            logger.warning("%s was given up by others: it starts no further row", self.name)


def lose_earlier_starts(link: Link, statements: WindowStatements, node: str, boot_id: str) -> int:
    """Free the consumer ids of runs that an earlier start of this node left running; returns how many."""
    lost: int = link.execute(statements.lose_earlier_starts, {"at_node": node, "boot": boot_id}).rowcount
    return lost
