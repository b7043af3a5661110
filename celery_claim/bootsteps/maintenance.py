"""Recover, promote, send runs again, forget what is old: in a thread of every worker, without beat or message."""

from __future__ import annotations

import importlib
import logging
import random
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import bootsteps

from celery_claim.app import claim_tasks, own_tables, state_of
from celery_claim.bootsteps.check import CheckStep
from celery_claim.exceptions import ClaimError, DatabaseUnavailable
from celery_claim.outages import Outage
from celery_claim.standing import identity_of

if TYPE_CHECKING:
    from celery import Celery

    from celery_claim.dispatch import Dispatcher
    from celery_claim.tasks import ClaimTask

logger = logging.getLogger(__name__)

#: Name of the lease that elects the worker whose turn it is.
LEASE = "maintenance"
#: Seconds between two looks for old rows of the history.
PRUNE_SECONDS = 60.0
#: A node that has been silent for so long leaves the register, and its queue the broker.
FORGET_NODE_SECONDS = 3600.0


class MaintenanceStep(bootsteps.StartStopStep):
    """Maintenance in every worker: it needs no beat and no message, and it cannot be forgotten."""

    name = "claim-maintenance"
    requires = (CheckStep, "celery.worker.components:Pool")

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._maintenance: Maintenance | None = None

    def start(self, parent: Any) -> None:
        tasks = list(claim_tasks(parent.app))
        if tasks:
            _prepare(tasks)
            self._maintenance = Maintenance(parent.app, tasks)
            self._maintenance.start()

    def stop(self, parent: Any) -> None:
        if self._maintenance is not None:
            self._maintenance.stop()

    terminate = stop


def _prepare(tasks: list[ClaimTask]) -> None:
    """Import and build here, in the main thread, what the maintenance thread would at its first round.

    A pool process that is forked in the middle of that inherits the locks of the import, or of the cached property,
    but not the thread that would let them go: it hangs at its first row.
    """
    for module in ("claims.recover", "rows.consume", "dispatch", "nodes.leases", "windows.runs"):
        importlib.import_module(f"celery_claim.{module}")
    for task in tasks:
        with suppress(ClaimError):  # a database that is down; its check has said so
            task.claims.statements.named()


class Maintenance(threading.Thread):
    """Gives rows of dead owners back, makes due retries claimable and looks after windows, every few seconds.

    One worker of a fleet does it at a time, elected by a lease for three rounds: a killed one is replaced after that.
    Where the lease cannot be had because its table is missing, every worker does it: that is harmless.
    """

    def __init__(self, app: Celery, tasks: list[ClaimTask]) -> None:
        super().__init__(name="celery_claim-maintenance", daemon=True)
        settings = state_of(app).settings
        self._app = app
        self._tasks = tasks
        self._interval = settings.maintenance_interval
        self._owner = identity_of(app).boot_id
        self._over = threading.Event()
        self._outages = {task.name: Outage(f"maintenance of {task.name}", logger) for task in tasks}
        self._dispatcher = _dispatcher(app) if settings.database_url is not None else None
        self._outage = Outage("maintenance of windows", logger)
        self._pruned_at = -PRUNE_SECONDS

    def run(self) -> None:
        # Not all workers of a fleet in the same instant, and not before their first interval: a restart is no crash.
        while not self._over.wait(self._interval * random.uniform(0.8, 1.2)):
            if self._elected():
                self._round()
        self._resign()

    def stop(self) -> None:
        """End after the statement that is running, and let another worker take over at once."""
        self._over.set()

    def _elected(self) -> bool:
        if self._dispatcher is None:
            return True
        from celery_claim.nodes.leases import acquire

        try:
            with self._dispatcher.database.linked(lock_wait_seconds=1) as link:
                ttl = round(3000 * self._interval)
                return acquire(link, own_tables(self._app).nodes, LEASE, self._owner, ttl_ms=ttl) is not None
        except ClaimError as error:
            self._outage.failed(error)
            # A task may have a database of its own, and that one may answer.
            return True

    def _resign(self) -> None:
        if self._dispatcher is None:
            return
        from celery_claim.nodes.leases import release

        with suppress(ClaimError), self._dispatcher.database.linked(lock_wait_seconds=1) as link:
            release(link, own_tables(self._app).nodes, LEASE, self._owner)

    def _round(self) -> None:
        for task in self._tasks:
            self._guarded(self._outages[task.name], partial(_maintain_rows, task))
        if self._dispatcher is not None:
            self._guarded(self._outage, self._maintain_windows)

    def _maintain_windows(self) -> None:
        dispatcher = self._dispatcher
        assert dispatcher is not None
        with dispatcher.database.linked(lock_wait_seconds=1) as link:
            dispatcher.maintain(link)
            if time.monotonic() - self._pruned_at >= PRUNE_SECONDS:
                self._pruned_at = time.monotonic()
                dispatcher.prune(link)
                dispatcher.forget_nodes(link, silent_seconds=FORGET_NODE_SECONDS)

    def _guarded(self, outage: Outage, work: Any) -> None:
        try:
            work()
        except ClaimError as error:
            outage.failed(error)
        except Exception as error:
            # This thread is all that brings rows of dead workers back.
            logger.exception("maintenance failed")
            outage.failed(error)
        else:
            outage.worked()


def _dispatcher(app: Celery) -> Dispatcher:
    from celery_claim.dispatch import Dispatcher

    dispatcher = Dispatcher.of(app)
    with suppress(DatabaseUnavailable):
        dispatcher.statements  # noqa: B018  built here, in the main thread
    return dispatcher


def _maintain_rows(task: ClaimTask) -> None:
    task.recover()
    task.promote()
