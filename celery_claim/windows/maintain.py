"""What the maintenance of any worker does for windows: send what was not sent, move what does not start, mark what is
over, forget what is old. Every step is a statement of its own that may be repeated, by anybody, at any time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from celery_claim.database import Link
from celery_claim.windows.fire import Rules, Run, read_field
from celery_claim.windows.place import Field
from celery_claim.windows.sql.statements import WindowStatements
from celery_claim.windows.window import Window

logger = logging.getLogger(__name__)

#: Runs that one round sends or moves at most.
WAITING_LIMIT = 500
#: Rows of the history that one statement deletes.
PRUNE_BATCH = 1000


@dataclass(frozen=True)
class Ended:
    """How many runs were marked as over."""

    lost: int = 0
    missed: int = 0


def end_overdue(link: Link, statements: WindowStatements) -> Ended:
    """Mark runs whose consumer is gone as lost and those that nobody started in time as missed."""
    lost = 0
    for run in link.execute(statements.dead_runs).all():
        if link.execute(statements.lose, {"run_id": run.id}).rowcount:
            lost += 1
            logger.warning(
                "window %s: consumer %s on %s is gone; what it held comes back when its leases end",
                run.window,
                run.consumer_id,
                run.node,
            )
            link.execute(statements.free_window, {"window_name": run.window, "fire": run.fire_seq})
    missed: int = link.execute(statements.miss_overdue).rowcount
    if missed:
        logger.warning("%d runs of windows were not started in time", missed)
    return Ended(lost, missed)


def resend(link: Link, statements: WindowStatements, rules: Rules, *, accept_timeout: int) -> list[Run]:
    """The runs whose messages are to be sent (again): those that were never sent, and those of run_type auto that
    their node does not start, moved to another node that has a free place.

    A published run of run_type any, all or main is never sent again: it waits in a busy queue, and two messages would
    only race for it.
    """
    rows = link.execute(statements.waiting, {"accept_timeout": accept_timeout, "limit": WAITING_LIMIT}).mappings().all()
    if not rows:
        return []
    look = link.execute(statements.look).mappings().all()
    windows = {row["name"]: Window.from_row(row, rules.cap) for row in look}
    seen = read_field(link, statements, rules)
    runs: list[Run] = []
    for row in rows:
        window = windows.get(row["window"])
        if window is None:
            continue
        waiting = _run_of(row, window)
        moves = window.run_type == "auto" and waiting.node
        run = _moved(link, statements, row, waiting, seen, rules) if moves else waiting
        if run is not None and (row["unpublished"] or run is not waiting):
            runs.append(run)
    return runs


def prune(link: Link, statements: WindowStatements, *, retention: int, max_rows: int, batches: int = 50) -> int:
    """Delete what the history need not keep, in small batches; returns how many rows.

    `retention`: milliseconds; `batches`: how many at most in one call. Two that prune at once delete each row once.
    """
    deleted = 0
    for _ in range(batches):
        ids = list(link.execute(statements.too_old, {"retention": retention, "limit": PRUNE_BATCH}).scalars())
        if not ids:
            oldest, newest = tuple(link.execute(statements.ages).one())
            if oldest is None or newest - oldest < max_rows:
                break
            # Numbers may have gaps: fewer rows than max_rows stay, never more.
            bound = newest - max_rows + 1
            ids = list(link.execute(statements.too_many, {"bound": bound, "limit": PRUNE_BATCH}).scalars())
            if not ids:
                break
        # By key, in order: two that prune at once lock the same rows by the same route.
        deleted += link.execute(statements.drop_runs, {"ids": sorted(ids)}).rowcount
    return deleted


def _run_of(row: Any, window: Window) -> Run:
    return Run(
        window=window,
        fire_seq=row["fire_seq"],
        node=row["node"],
        consumer_id=row["consumer_id"],
        ordinal=row["ordinal"],
        consumers=row["consumers"],
        attempt=row["attempt"],
    )


def _moved(link: Link, statements: WindowStatements, row: Any, run: Run, seen: Field, rules: Rules) -> Run | None:
    """The run on another node; the same one where there is none; None when it was started meanwhile."""
    node = seen.another(run.node, rules.queue_of(run.window))
    if node is None:
        return run
    moved = replace(run, node=node, attempt=run.attempt + 1)
    change = {"run_id": row["id"], "number": run.attempt, "new_node": node, "new_task_id": moved.task_id}
    if not link.execute(statements.move, change).rowcount:
        return None
    logger.info(
        "window %s: node %s did not start consumer %s, it goes to %s", run.window.name, run.node, run.consumer_id, node
    )
    return moved
