"""What a handler may return or raise to say what becomes of its row."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

#: Seconds, 68 years: more would overflow a column or the driver, and so keep the row's outcome from being written.
LONGEST_DELAY = 2**31 - 1


class HandlerOutcome(Exception):
    """Base of Done, Retry, Fail and Skip: each may be returned or raised."""


class Done(HandlerOutcome):
    """The row succeeded; `values` are its own columns to write in the same statement as the status.

    Changes to the row object itself are not saved: it is detached.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values)
        self.values: dict[str, Any] = dict(values or {})


class Retry(HandlerOutcome):
    """Run the row again, in `countdown` seconds or after the task's backoff.

    Obeyed without limit while the task's max_retries is 0; with max_retries > 0 it counts like an exception.
    """

    def __init__(self, countdown: float | None = None, reason: str | None = None) -> None:
        super().__init__(countdown, reason)
        if countdown is not None and not 0 <= countdown <= LONGEST_DELAY:
            raise ValueError(f"Retry(countdown={countdown!r}): expected seconds from 0 to {LONGEST_DELAY}")
        self.countdown = countdown
        self.reason = reason


class Fail(HandlerOutcome):
    """The row failed for good: no retry."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason


class Skip(HandlerOutcome):
    """Not now: the row stays ours until the run ends, then it goes back as if it had never been claimed.

    Not at once, or the same run would claim it again and again.
    """


def seconds_until(moment: datetime) -> float:
    """How long to wait until then, 0 when it is over; without a time zone it is UTC, as Celery has it."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return max(0.0, (aware - datetime.now(timezone.utc)).total_seconds())
