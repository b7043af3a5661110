"""For tests of programs that use celery_claim: the passage of time, without waiting for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_claim.tasks import ClaimTask

#: The columns in which the database's clock is kept.
_TIMES = ("claim_time", "next_retry_time", "created_time")


def age(task: ClaimTask, seconds: float, keys: Sequence[Any] | None = None) -> None:
    """Make a task's rows, or those of the given keys, older: as if the database's clock had moved on.

    Leases run out and retries come due without waiting. It cannot be told from the passage of time by anything that
    the database decides; a live worker's own clock does not move, and its next renewal starts the lease anew.

    ::

        send_mail.drain()                     # the handler raises, the row waits for its retry
        age(send_mail, 10)
        assert send_mail.promote() == [1]
    """
    table = task.claims.table
    times = [column for role in _TIMES if (column := table.column(role)) is not None]
    # Each column by a statement of its own: NULL stays NULL, and the order of assignments cannot matter.
    with task.claims.linked() as link:
        for column in times:
            statement = table.table.update().values({column: column - math.ceil(seconds)})
            if keys is not None:
                statement = statement.where(table.key.in_(list(keys)))
            link.execute(statement)
