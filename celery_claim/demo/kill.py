"""kill: end a worker with kill -9 while it holds rows."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Engine

from celery_claim.demo.look import Snapshot, rows_held_by
from celery_claim.demo.run import Process

#: Seconds between two looks at the rows of a frozen worker: a statement that it had sent may still be executed.
SETTLE = 0.02
SETTLE_LOOKS = 50


@dataclass(frozen=True)
class Killed:
    """Which worker was killed, when, and the rows it held."""

    worker: str
    pid: int
    #: Seconds since the demo began.
    seconds: float
    #: Rows of the whole table that had ended by then.
    ended: int
    rows: frozenset[int]


def kill_holder(
    engine: Engine, workers: Iterable[Process], snapshot: Snapshot, *, least: int, seconds: float
) -> Killed | None:
    """Kill the worker that holds the most rows; None when that is less than `least`, or it was quicker than we.

    It is frozen first, because between a look at the table and a kill it could finish its batch.
    """
    victim = max(workers, key=lambda worker: snapshot.held[worker.name])
    if snapshot.held[victim.name] < least:
        return None
    victim.freeze()
    rows = _settled_rows(engine, victim.name)
    if not rows:
        victim.thaw()
        return None
    victim.kill()
    return Killed(victim.name, victim.pid, seconds, snapshot.ended, rows)


def _settled_rows(engine: Engine, worker: str) -> frozenset[int]:
    before = rows_held_by(engine, worker)
    for _ in range(SETTLE_LOOKS):
        time.sleep(SETTLE)
        rows = rows_held_by(engine, worker)
        if rows == before:
            break
        before = rows
    return before
