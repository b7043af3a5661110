"""Count and list rows by state without becoming the table's heaviest load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_claim.claims.sql.statements import Statements
from celery_claim.database import Link
from celery_claim.states import Status

#: Counting stops here: an exact COUNT(*) of a large table reads all of it.
COUNT_LIMIT = 1_000_000


def count(link: Link, statements: Statements) -> dict[str, int | None]:
    """Rows in each state, at most COUNT_LIMIT each, and `oldest_pending_seconds`."""
    table = statements.of
    counts: dict[str, int | None] = {}
    for status in Status:
        rows = link.execute(statements.count(status), {"limit": COUNT_LIMIT}).scalar_one() if table.knows(status) else 0
        counts[status.name.lower()] = int(rows)
    age = link.execute(statements.oldest_pending).scalar() if table.has("created_time") else None
    counts["oldest_pending_seconds"] = None if age is None else max(0, int(age))
    return counts


def count_stuck(link: Link, statements: Statements) -> int:
    """Rows in progress that no one will ever recover."""
    if not statements.of.has("lease_seconds"):
        return 0
    return int(link.execute(statements.stuck, {"limit": COUNT_LIMIT}).scalar_one())


def failures(link: Link, statements: Statements, limit: int) -> list[tuple[Any, str | None]]:
    """Keys of failed rows with their errors, by key."""
    rows: Sequence[Any] = link.execute(statements.failures, {"limit": limit}).all()
    return [(key, error) for key, error in rows]
