"""One run of a window in a worker: take it, consume rows while it is ours, write what became of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded

from celery_claim.app import state_of
from celery_claim.claims.renew import renewer_of
from celery_claim.database import persistently
from celery_claim.dispatch import Dispatcher
from celery_claim.exceptions import ClaimError
from celery_claim.rows.consume import Consumer, Place
from celery_claim.standing import identity_of
from celery_claim.stopping import worker_is_stopping
from celery_claim.tasks import ClaimTask
from celery_claim.tasks.row_signals import RowSignals
from celery_claim.windows.runs import End, RunLease, Started, end, start

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: Seconds to try to take a run through faults of the database; its message is gone afterwards, and its row tells.
START_SECONDS = 5.0


def run_window(task: ClaimTask, message: Mapping[str, Any]) -> dict[str, Any]:
    """Do the run that a message names; returns its counts, or that it was not ours to do."""
    dispatcher = Dispatcher.of(task.app)
    try:
        started = _started(dispatcher, task, message)
    except ClaimError as error:
        task._outage().failed(error)
        return {"error": str(error)}
    if started is None:
        return {"error": None, "taken": False}
    return _Run(dispatcher, task, started).work()


def _started(dispatcher: Dispatcher, task: ClaimTask, message: Mapping[str, Any]) -> Started | None:
    identity = identity_of(task.app)
    with dispatcher.database.linked() as link:
        return persistently(
            lambda: start(
                link,
                dispatcher.statements,
                message,
                node=identity.name or message["node"],
                boot_id=identity.boot_id,
                node_timeout=dispatcher.rules.node_timeout,
            ),
            until=time.monotonic() + START_SECONDS,
            stopping=worker_is_stopping,
        )


class _Run:
    """A run that is ours until it ends."""

    def __init__(self, dispatcher: Dispatcher, task: ClaimTask, started: Started) -> None:
        self._dispatcher = dispatcher
        self._task = task
        self._started = started
        self._deadline = time.monotonic() + started.left / 1000
        self._lease = RunLease(
            dispatcher.statements, started, dispatcher.rules, heartbeat=dispatcher.settings.node_heartbeat
        )
        self._events = RunEvents(task)
        self._consumer: Consumer | None = None

    def work(self) -> dict[str, Any]:
        renewer = renewer_of(self._dispatcher.database)
        renewer.hold(self._lease)
        try:
            ended = self._consume()
        except SoftTimeLimitExceeded:
            self._end(End("timeout", self._counts(), "the run's own time limit struck while a row was worked on"))
            raise
        except BaseException as error:
            self._end(End("error", self._counts(), f"{type(error).__name__}: {error}"))
            raise
        finally:
            renewer.drop(self._lease)
        self._end(ended)
        return {**ended.counts, "error": ended.error}

    def _consume(self) -> End:
        try:
            self._consumer = self._task._consumer(
                in_worker=True,
                place=Place(self._started.consumer_id, self._started.ordinal, self._started.consumers),
                deadline=self._deadline,
                should_stop=lambda: worker_is_stopping() or self._lease.over,
                observer=self._events,
            )
            counts = asdict(self._task._consume(self._consumer))
        except ClaimError as error:
            self._task._outage().failed(error)
            return End("error", self._counts(), str(error))
        self._task._outage().worked()
        if self._consumer.broken:
            return End("error", counts, "too many of the last rows failed unexpectedly")
        if self._consumer.exhausted:
            return End("done" if counts["claimed"] else "empty", counts)
        timed_out = time.monotonic() >= self._deadline and not worker_is_stopping() and not self._lease.over
        return End("timeout" if timed_out else "done", counts, unfinished=timed_out)

    def _counts(self) -> dict[str, Any]:
        return asdict(self._consumer.counts()) if self._consumer is not None else {}

    def _end(self, ended: End) -> None:
        """Write what became of the run, through faults of the database for as long as it is ours."""
        self._events.finished(ended)
        with self._dispatcher.database.linked() as link:
            try:
                successors = persistently(
                    lambda: end(link, self._dispatcher.statements, self._started, ended, self._dispatcher.rules),
                    until=time.monotonic() + self._dispatcher.settings.node_timeout,
                    stopping=worker_is_stopping,
                )
            except ClaimError as error:
                # Its rows are written. The run itself counts as lost when its time is over, which frees its number.
                logger.error("what became of %s was not written: %s", self._lease.name, error)
                return
            if successors is None:
                logger.warning("%s had been given up by others when it ended", self._lease.name)
            elif successors:
                self._dispatcher.publish(successors, link)


class RunEvents(RowSignals):
    """Row signals of a run, and Celery's events about the run itself.

    The task sends no events of its own: empty runs every few seconds would push real tasks out of a monitor's memory.
    A run that has claimed a row is worth a line there, and says so itself.
    """

    def __init__(self, task: ClaimTask) -> None:
        super().__init__(task)
        self._started_at = time.monotonic()
        self._seen = False

    def claimed(self, rows: Mapping[Any, Any]) -> None:
        if not self._seen:
            self._seen = True
            request = self._task.request
            self._send(
                "task-received",
                name=self._task.name,
                args=getattr(request, "argsrepr", None),
                kwargs=getattr(request, "kwargsrepr", None),
                root_id=request.root_id,
                parent_id=request.parent_id,
                retries=request.retries,
                eta=None,
                expires=None,
            )
            self._send("task-started")
        super().claimed(rows)

    def finished(self, ended: End) -> None:
        """The run is over."""
        if not self._seen:
            return
        if ended.state == "error":
            self._send("task-failed", exception=ended.error, traceback="")
        else:
            self._send("task-succeeded", result=repr(ended.counts), runtime=time.monotonic() - self._started_at)

    def _send(self, kind: str, **fields: Any) -> None:
        if not _can_broadcast(self._task.app):
            return
        try:
            self._task.send_event(kind, retry=False, **fields)
        except Exception as error:  # every broker has errors of its own, and an event is worth none of a row's
            logger.debug("event %s was not sent: %s", kind, error)


def _can_broadcast(app: Celery) -> bool:
    """Whether the broker has fanout; without, events would gather in a queue that nobody reads."""
    return state_of(app).once("can broadcast", lambda: app.connection_for_write().supports_exchange_type("fanout"))
