"""What the tables say at this instant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sqlalchemy import Engine, func, select

from celery_claim import Status
from celery_claim.demo.tables import File, Handling

ENDED = (Status.SUCCEEDED, Status.FAILED, Status.CANCELLED)


@dataclass(frozen=True)
class Snapshot:
    """Rows by state, and by worker."""

    states: Counter[Status] = field(default_factory=Counter)
    #: Rows that each worker holds now, and handlings that each has finished, by the worker's name.
    held: Counter[str] = field(default_factory=Counter)
    handled: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.states.total()

    @property
    def ended(self) -> int:
        return sum(self.states[status] for status in ENDED)


def look(engine: Engine) -> Snapshot:
    """Counts of the demo's two tables."""
    states = select(File.status, func.count()).group_by(File.status)
    held = select(File.worker_id, func.count()).where(File.status == Status.PROCESSING).group_by(File.worker_id)
    handled = select(Handling.worker_id, func.count()).group_by(Handling.worker_id)
    with engine.connect() as connection:
        return Snapshot(
            states=Counter({Status(status): count for status, count in connection.execute(states)}),
            held=_by_worker(connection.execute(held).all()),
            handled=_by_worker(connection.execute(handled).all()),
        )


def rows_held_by(engine: Engine, worker: str) -> frozenset[int]:
    """Ids of the rows that this worker has claimed and not yet written back."""
    mine = File.worker_id.startswith(worker + "-", autoescape=True)
    with engine.connect() as connection:
        return frozenset(connection.scalars(select(File.id).where(File.status == Status.PROCESSING, mine)))


def open_rows(engine: Engine, ids: frozenset[int]) -> int:
    """How many of these rows have not ended yet."""
    unfinished = select(func.count()).select_from(File).where(File.id.in_(ids), File.status.not_in(ENDED))
    with engine.connect() as connection:
        return connection.execute(unfinished).scalar_one()


def _by_worker(counts: object) -> Counter[str]:
    # worker_id is <worker>-c<consumer>: add up the consumers of one worker.
    total: Counter[str] = Counter()
    for worker_id, count in counts:  # type: ignore[attr-defined]
        total[(worker_id or "").rsplit("-c", 1)[0]] += count
    return total
