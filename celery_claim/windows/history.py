"""What was: the runs of windows, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_claim.database import Link
from celery_claim.windows.sql.statements import WindowStatements

#: What went wrong, or did not happen.
FAILED_STATES = ("error", "skipped", "missed", "lost")


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
    query = statements.history(
        limit,
        since_ms=None if since_seconds is None else round(since_seconds * 1000),
        window=window,
        node=node,
        fire_seq=fire_seq,
        state=states,
    )
    return [dict(row) for row in link.execute(query).mappings()]
