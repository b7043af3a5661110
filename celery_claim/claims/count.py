"""Count rows by state without becoming the table's heaviest load."""

from __future__ import annotations

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
