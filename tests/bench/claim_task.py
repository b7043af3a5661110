"""ClaimTask with a handler that does nothing, as a worker would run it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery
from sqlalchemy import Table

from celery_claim import ClaimTask
from celery_claim.claims.claim import Claim, claim
from celery_claim.rows import consume

from .crew import Seat
from .model import WORK, Work
from .peer import sink

LEASE_SECONDS = 600


def prepare(seat: Seat, url: str, batch: int, done: str, kind: str, path: Path | None) -> Callable[[], dict[str, Any]]:
    """A drain of the table by one consumer of a window. `kind` is "core" or "orm"; `path` is where jobs are noted."""
    if path is not None:
        os.environ["BENCH_SINK"] = str(path)
    task = _task(url, batch, done, kind, path is not None)
    place = consume.Place(consumer_id=seat.ordinal, ordinal=seat.ordinal, consumers=seat.consumers)
    task.drain(limit=1)  # connects and compiles the statements
    claims = _Claims()

    def drain() -> dict[str, Any]:
        with claims:
            counts = task._consume(task._consumer(in_worker=True, place=place))
        if counts.claimed != counts.succeeded:
            raise RuntimeError(f"not every row succeeded: {counts}")
        return {
            "handled": counts.succeeded,
            "candidates": claims.candidates,
            "lost": claims.candidates - counts.claimed,
            "claims": claims.count,
        }

    return drain


def claimer(url: str, table: Table, batch: int) -> Callable[[], int]:
    """One claim of `batch` rows at the head of the table; returns how many were won."""
    task = _app(url).task(name=f"claim-{table.name}", base=ClaimTask, model=table)(_nothing)
    claims = task.claims
    link = claims.database.link()
    return lambda: len(
        claim(link, claims.statements, limit=batch, lease_seconds=LEASE_SECONDS, worker_id="bench-c0").rows
    )


@functools.cache
def _app(url: str) -> Celery:
    app = Celery("bench", broker="memory://", set_as_current=False)
    app.conf.claim_database_url = url
    return app


@functools.cache
def _task(url: str, batch: int, done: str, kind: str, noted: bool) -> Any:
    return _app(url).task(
        name=f"drain-{batch}-{done}-{kind}-{noted}",
        base=ClaimTask,
        model=Work if kind == "orm" else WORK,
        batch_size=batch,
        write_back=done,
        lease_seconds=LEASE_SECONDS,
    )(_note if noted else _nothing)


def _nothing(row: object) -> None:
    """The handler."""


def _note(row: Any) -> None:
    sink.done(row.id)


class _Claims:
    """Counts the candidates of a run, which the run itself does not report: about a microsecond a claim."""

    def __init__(self) -> None:
        self.count = self.candidates = 0

    def __enter__(self) -> None:
        self.count = self.candidates = 0
        consume.claim = self._counted

    def __exit__(self, *exc: object) -> None:
        consume.claim = claim

    def _counted(self, *arguments: Any, **named: Any) -> Claim:
        claimed = claim(*arguments, **named)
        self.count += 1
        self.candidates += claimed.candidates
        return claimed
