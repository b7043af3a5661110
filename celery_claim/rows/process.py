"""Run the handler on claimed rows and judge how it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import celery.exceptions
import kombu.exceptions

from celery_claim.backoff import exponential
from celery_claim.claims.sql.load import Unreadable
from celery_claim.claims.write_back import Outcome
from celery_claim.dialects import Fault, fault_of
from celery_claim.exceptions import Contention, DatabaseUnavailable
from celery_claim.rows.outcomes import LONGEST_DELAY, Done, Fail, HandlerOutcome, Retry, Skip, seconds_until
from celery_claim.states import Status

logger = logging.getLogger(__name__)


def interrupts(error: BaseException) -> bool:
    """Whether an exception ends the run and says nothing of the row: SystemExit, KeyboardInterrupt, a time limit."""
    return not isinstance(error, Exception) or isinstance(error, celery.exceptions.SoftTimeLimitExceeded)


#: A fault of the database or the broker while the handler ran; never the row's own failure.
_INFRASTRUCTURE = frozenset({Fault.LOST, Fault.READ_ONLY, Fault.UNAVAILABLE, Fault.DENIED, Fault.CONTENTION})


@dataclass(frozen=True)
class RetryPolicy:
    """When a row whose handler raised is run again. The names are Celery's."""

    #: How many exceptions a row may raise and be run again; 0: it fails at the first.
    max_retries: int = 0
    #: Seconds before the first retry; doubled each time.
    retry_backoff: float = 5.0
    retry_backoff_max: float = 3600.0
    retry_jitter: bool = True
    #: Exceptions after which there is no retry.
    no_retry_for: tuple[type[BaseException], ...] = ()

    def delay(self, retries: int) -> float:
        return exponential(retries, base=self.retry_backoff, cap=self.retry_backoff_max, jitter=self.retry_jitter)


@dataclass(frozen=True)
class Verdict:
    """How the handler ended for one row."""

    #: What to write; None for a row that goes back when the run ends.
    outcome: Outcome | None
    #: Whether the handler raised something it was not meant to: the circuit breaker counts these.
    unexpected: bool = False


SUCCEEDED = Verdict(Outcome(Status.SUCCEEDED))


@dataclass(frozen=True)
class Judge:
    """Says what an outcome or exception of a handler means for its row."""

    policy: RetryPolicy
    #: How often a row was retried before.
    retries: Callable[[Any], int]
    #: Raises ValueError for `Done(values=...)` that the table has no columns for.
    check_values: Callable[[Mapping[str, Any]], object]

    def __call__(self, end: BaseException, row: Any) -> Verdict:
        match end:
            case Done():
                return self._done(end, row)
            case Fail():
                return Verdict(Outcome(Status.FAILED, end.reason, cause=end))
            case Skip() | celery.exceptions.Ignore():
                return Verdict(None)
            case celery.exceptions.Reject():
                return (
                    Verdict(None)
                    if getattr(end, "requeue", False)
                    else Verdict(Outcome(Status.FAILED, _text(end), cause=end))
                )
            case Retry():
                return self._asked_retry(end.countdown, end.reason, end, row)
            case celery.exceptions.Retry():
                return self._asked_retry(_countdown(end), _text(end.exc) if end.exc else None, end, row)
        return self._raised(end, row)

    def _done(self, end: Done, row: Any) -> Verdict:
        try:
            self.check_values(end.values)
        except ValueError as error:
            return self._raised(error, row)
        return Verdict(Outcome(Status.SUCCEEDED, values=end.values))

    def _raised(self, error: BaseException, row: Any) -> Verdict:
        if is_infrastructure(error):
            logger.warning("the database or broker failed while a row was processed; it goes back: %s", _text(error))
            return Verdict(None, unexpected=True)
        retries = self._retries_of(row)
        if retries >= self.policy.max_retries or isinstance(error, self.policy.no_retry_for):
            return Verdict(Outcome(Status.FAILED, _text(error), cause=error), unexpected=True)
        return Verdict(Outcome(Status.RETRYING, _text(error), self.policy.delay(retries), cause=error), unexpected=True)

    def _asked_retry(self, countdown: float | None, reason: str | None, end: BaseException, row: Any) -> Verdict:
        retries = self._retries_of(row)
        if 0 < self.policy.max_retries <= retries:
            why = f"no more retries (max_retries={self.policy.max_retries})" + (f": {reason}" if reason else "")
            return Verdict(Outcome(Status.FAILED, why, cause=end))
        delay = self.policy.delay(retries) if countdown is None else countdown
        return Verdict(Outcome(Status.RETRYING, reason, min(delay, LONGEST_DELAY), cause=end))

    def _retries_of(self, row: Any) -> int:
        return row.retries if isinstance(row, Unreadable) else self.retries(row)


def process(row: Any, handler: Callable[[Any], Any], judge: Judge) -> Verdict:
    """Run the handler on one row. Raises only what interrupts the run (see `interrupts`)."""
    if isinstance(row, Unreadable):
        return judge(row.error, row)
    try:
        returned = handler(row)
    except BaseException as error:
        if interrupts(error):
            raise
        return judge(error, row)
    return judge(returned, row) if isinstance(returned, HandlerOutcome) else SUCCEEDED


def process_batch(rows: Mapping[Any, Any], handler: Callable[[list[Any]], Any], judge: Judge) -> dict[Any, Verdict]:
    """Run a batch handler; what it raises each row has raised. Raises only what interrupts the run."""
    readable = {key: row for key, row in rows.items() if not isinstance(row, Unreadable)}
    verdicts = {key: judge(row.error, row) for key, row in rows.items() if isinstance(row, Unreadable)}
    if not readable:
        return verdicts
    try:
        ends = _ends(handler(list(readable.values())), readable)
    except BaseException as error:
        if interrupts(error):
            raise
        ends = dict.fromkeys(readable, error)
    return verdicts | {key: _verdict(ends.get(key), row, judge) for key, row in readable.items()}


def _ends(returned: Any, rows: Mapping[Any, Any]) -> Mapping[Any, Any]:
    if returned is None:
        return {}
    if isinstance(returned, HandlerOutcome):
        return dict.fromkeys(rows, returned)
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"process_batch returned {type(returned).__name__}; expected None or a dict of key -> None, Done, Retry, "
            "Fail, Skip or an exception"
        )
    unknown = [key for key in returned if key not in rows]
    if unknown:
        raise LookupError(f"process_batch returned keys that were not in its batch: {unknown[:5]!r}")
    return returned


def _verdict(end: Any, row: Any, judge: Judge) -> Verdict:
    if end is None:
        return SUCCEEDED
    if isinstance(end, BaseException):
        return judge(end, row)
    wrong = f"process_batch returned {type(end).__name__} for a row; expected None, an outcome or an exception"
    return judge(TypeError(wrong), row)


def is_infrastructure(error: BaseException) -> bool:
    """Whether an exception is a database's or the broker's trouble, and so no fault of the row."""
    ours = (kombu.exceptions.OperationalError, DatabaseUnavailable, Contention)
    return isinstance(error, ours) or fault_of(error) in _INFRASTRUCTURE


def _countdown(end: celery.exceptions.Retry) -> float | None:
    if isinstance(end.when, datetime):
        return seconds_until(end.when)
    return float(end.when) if isinstance(end.when, (int, float)) else None


def _text(error: BaseException) -> str:
    """Class and text of an exception, for the error_message column."""
    try:
        words = str(error)
    except Exception as broken:  # an exception's own __str__ may be broken; the row's status must be written anyway
        words = f"(its text cannot be made: {type(broken).__name__})"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
