"""What a worker on redis-streams:// does besides.

It hands back what it will not start, tells of dead letters, and ends tasks whose lease was lost, if that is wanted.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from celery import bootsteps
from celery.signals import task_received, worker_shutting_down
from celery.worker import state as worker_state

from celery_claim.bootsteps.check import EXIT_CONFIGURATION
from celery_claim.bootsteps.errands import Errands
from celery_claim.bootsteps.flush import keep_what_is_on_its_way
from celery_claim.bootsteps.starts import Starts
from celery_claim.bootsteps.unreadable import Refusals
from celery_claim.exceptions import ConfigurationError
from celery_claim.signals import lease_lost, message_dead
from celery_claim.streams.options import read_options

logger = logging.getLogger(__name__)

#: Seconds that a worker that stops waits for the results of dead letters to be written.
FINISH_SECONDS = 5.0


class StreamsStep(bootsteps.StartStopStep):
    """Acts only where the worker consumes from redis-streams://."""

    name = "claim-streams"
    # Before it stops reading, the worker hands back what it has not started.
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self.enabled = _is_ours(parent.app)
        if not self.enabled:
            return
        self._consumer = parent
        self._app = parent.app
        try:
            self._terminates = _terminates_lost(parent)
        except ConfigurationError as error:
            logger.critical("%s", error)
            raise SystemExit(EXIT_CONFIGURATION) from error
        # Before the strategies of tasks are made, which keep the pool's method.
        self._starts = Starts(parent.pool)
        parent.pool.apply_async = self._starts.apply_async
        Refusals(parent)
        self._giving_back = threading.Lock()
        self._errands = Errands("celery_claim-give-back")
        self._epitaphs = Errands("celery_claim-dead-letters")
        # Strong references, which Celery's signals do not keep.
        worker_shutting_down.connect(self._on_shutting_down, weak=False)
        message_dead.connect(self._on_message_dead, weak=False)
        task_received.connect(_tell_the_task_its_eta, sender=parent, weak=False)
        if self._terminates:
            lease_lost.connect(self._on_lease_lost, weak=False)

    def include_if(self, parent: Any) -> bool:
        return bool(self.enabled)

    def start(self, parent: Any) -> None:
        # Only now the pool has started, and with it the method that is wrapped.
        keep_what_is_on_its_way(parent.pool)
        for errands in (self._errands, self._epitaphs):
            if errands.ident is None:
                errands.start()

    def stop(self, parent: Any) -> None:
        if parent.blueprint.state == bootsteps.RUN:  # type: ignore[attr-defined]
            # The connection was lost and comes back; what is held stays held.
            return
        self._give_back()

    def shutdown(self, parent: Any) -> None:
        worker_shutting_down.disconnect(self._on_shutting_down)
        message_dead.disconnect(self._on_message_dead)
        task_received.disconnect(_tell_the_task_its_eta, sender=self._consumer)
        lease_lost.disconnect(self._on_lease_lost)
        self._errands.finish(FINISH_SECONDS)
        self._epitaphs.finish(FINISH_SECONDS)

    def _on_shutting_down(self, **_: Any) -> None:
        # The event loop may be busy with a task (solo) or wait for a place in the pool (gevent) for a long time yet.
        self._errands.put(self._give_back)

    def _give_back(self) -> None:
        """Read no more, and hand what was read and not started to other workers: at once, in order, uncounted."""
        with self._giving_back:
            self._starts.close()
            consumer = getattr(self._consumer, "task_consumer", None)
            channel = getattr(consumer, "channel", None)
            if channel is None:
                return
            try:
                count = channel.stop_reading()
                count += channel.give_back(self._unstarted(channel))
            except self._consumer.connection_errors as error:
                logger.warning("messages that were not started could not be handed back, their lease ends: %s", error)
                return
            if count:
                logger.info("%d messages that were not started went back to their queues", count)

    def _unstarted(self, channel: Any) -> list[str]:
        """The tags of messages that were delivered to Celery and whose work has not begun."""
        requests = [*_snapshot(worker_state.reserved_requests), *self._timed(), *self._limited()]
        return [
            str(request.message.delivery_tag)
            for request in dict.fromkeys(requests)
            if request.message.channel is channel and not request.acknowledged and not self._starts.has_begun(request)
        ]

    def _timed(self) -> Iterator[Any]:
        """Requests that wait in the worker's own timer for their ETA."""
        for scheduled in list(self._consumer.timer.queue):
            yield from _requests_in(scheduled.entry.args)

    def _limited(self) -> Iterator[Any]:
        """Requests that wait for their rate limit."""
        for bucket in list(self._consumer.task_buckets.values()):
            for waiting in list(bucket.contents) if bucket else ():
                yield from _requests_in(waiting)

    def _on_lease_lost(self, tag: str, **_: Any) -> None:
        self._errands.put(lambda: self._terminate(tag))

    def _terminate(self, tag: str) -> None:
        """End the process of a task that another worker runs; its result is the other worker's to write."""
        for request in _snapshot(worker_state.active_requests):
            if request.message.delivery_tag == tag and request.worker_pid:
                logger.warning("task %s[%s] is ended: its lease was lost", request.name, request.id)
                # As when Celery itself cancels what a lost connection gave to others: neither revoked nor failed, and
                # not acknowledged. Request.cancel() would also note RETRY over a result that may be there already.
                request._already_cancelled = True
                request.send_event("task-cancelled")
                self._consumer.pool.terminate_job(request.worker_pid, signal.SIGTERM)

    def _on_message_dead(self, death: Any, **_: Any) -> None:
        def write() -> None:
            from celery_claim.bootsteps.epitaph import mark_failed

            dispatcher = self._consumer.event_dispatcher
            mark_failed(self._app, death, send_event=bool(dispatcher and dispatcher.enabled))

        self._epitaphs.put(write)


def _is_ours(app: Any) -> bool:
    """Whether the app consumes from our transport; any other is not even imported for the answer."""
    transport = app.connection_for_read().get_transport_cls()
    return bool(transport.__module__.startswith("celery_claim."))


def _tell_the_task_its_eta(request: Any, **_: Any) -> None:
    """Let a task that the broker held until it was due see its ETA (`self.request.eta`), without waiting once more.

    The worker has read the ETA from the message already; what it reads now goes to the task alone.
    """
    eta = request.message.headers.get("x-eta")
    if eta is not None:
        request.request_dict["eta"] = eta


def _terminates_lost(consumer: Any) -> bool:
    """Whether tasks whose lease was lost are to be ended; ConfigurationError where the pool cannot."""
    options = read_options(consumer.app.connection_for_read().transport_options)
    if options.on_lease_lost != "terminate":
        return False
    pool = type(consumer.pool)
    if pool.__module__ != "celery.concurrency.prefork":
        raise ConfigurationError(
            f"transport option 'on_lease_lost' is 'terminate', which needs `celery worker -P prefork`; the pool is "
            f"{pool.__module__}, whose tasks have no process of their own. Use prefork, or 'log'"
        )
    return True


def _requests_in(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in values if hasattr(value, "delivery_info") and hasattr(value, "acknowledged"))


def _snapshot(requests: Any) -> list[Any]:
    """The members of a weak set that another thread may add to meanwhile."""
    while True:
        try:
            return list(requests)
        except RuntimeError:
            continue
