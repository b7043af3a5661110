"""What was: the runs of windows, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select

from celery_claim.database import Link
from celery_claim.dialects import epoch_milliseconds
from celery_claim.windows.sql.statements import WindowStatements

#: What went wrong, or did not happen.
FAILED_STATES = ("error", "timeout", "skipped", "missed", "lost")


def runs(
    link: Link,
    statements: WindowStatements,
    *,
    window: str | None = None,
    states: Sequence[str] | None = None,
    node: str | None = None,
    fire_seq: int | None = None,
    since_seconds: float | None = None,
    limit: int = 50,
) -> list[dict[str, Any]]:
    """Runs as rows of their table, newest first."""
    run = statements.tables.run.c
    query = select(statements.tables.run).order_by(run.id.desc()).limit(limit)
    if window is not None:
        query = query.where(run.window == window)
    if states is not None:
        query = query.where(run.state.in_(states))
    if node is not None:
        query = query.where(run.node == node)
    if fire_seq is not None:
        query = query.where(run.fire_seq == fire_seq)
    if since_seconds is not None:
        query = query.where(run.created_at >= epoch_milliseconds() - round(since_seconds * 1000))
    return [dict(row) for row in link.execute(query).mappings()]
