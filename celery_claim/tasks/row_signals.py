"""What becomes of the rows of a task, told to Celery signals and the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import celery

from celery_claim import signals
from celery_claim.states import Status

if TYPE_CHECKING:
    from celery_claim.claims.write_back import Outcome
    from celery_claim.tasks.table_task import TableTask

logger = logging.getLogger(__name__)


class RowSignals:
    """Tells Celery signals and the log what happens to the rows of a task."""

    def __init__(self, task: TableTask) -> None:
        self._task = task

    def claimed(self, rows: Mapping[Any, Any]) -> None:
        if signals.row_claimed.receivers:
            signals.row_claimed.send(sender=self._task, keys=list(rows), rows=list(rows.values()))

    def ended(self, outcomes: Mapping[Any, Outcome]) -> None:
        heard = bool(signals.row_succeeded.receivers)
        for key, outcome in outcomes.items():
            if outcome.status is not Status.SUCCEEDED:
                self._did_not_succeed(key, outcome)
            elif heard:
                signals.row_succeeded.send(sender=self._task, key=key)

    def _did_not_succeed(self, key: Any, outcome: Outcome) -> None:
        failure = {"key": key, "reason": outcome.error, "exception": outcome.cause}
        if outcome.status is Status.FAILED:
            logger.error("%s: row %r failed: %s", self._task.name, key, outcome.error, exc_info=_traceback(outcome))
            signals.row_failed.send(sender=self._task, **failure)
        else:
            logger.warning("%s: row %r waits %.0f s: %s", self._task.name, key, outcome.delay, outcome.error)
            signals.row_retried.send(sender=self._task, countdown=outcome.delay, **failure)

    def lost(self, keys: Sequence[Any]) -> None:
        logger.warning(
            "%s: rows %r are no longer ours; their results were not written", self._task.name, list(keys)[:20]
        )
        signals.claim_lost.send(sender=self._task, keys=list(keys))


def _traceback(outcome: Outcome) -> BaseException | None:
    """The exception whose traceback helps: not that of a Fail or Retry the handler chose."""
    return outcome.cause if outcome.cause is not None and outcome.cause.__traceback__ and _surprising(outcome) else None


def _surprising(outcome: Outcome) -> bool:
    from celery_claim.rows.outcomes import HandlerOutcome

    return not isinstance(outcome.cause, (HandlerOutcome, celery.exceptions.Retry, celery.exceptions.Reject))
