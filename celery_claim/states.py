"""The states of a claimed row."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """What the status column says of a row.

    ::

        PENDING -> PROCESSING -> SUCCEEDED | FAILED | RETRYING | PENDING (released)
        RETRYING -> PENDING (promoted when due)      PENDING, QUEUED, RETRYING -> CANCELLED
        FAILED -> PENDING (by an operator only)      QUEUED: the row waits in a stream
    """

    PENDING = 0
    PROCESSING = 1
    SUCCEEDED = 2
    FAILED = 3
    QUEUED = 4
    RETRYING = 5
    CANCELLED = 6


#: A table cannot be consumed without these; the others may be missing from a mapped table.
REQUIRED_STATUSES = (Status.PENDING, Status.PROCESSING, Status.SUCCEEDED, Status.FAILED)
