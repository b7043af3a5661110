"""What the plugin adds to a Celery worker: a check at start, the queue of windows, and the maintenance thread."""

from __future__ import annotations

import importlib
import logging
import random
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import celery
from celery import bootsteps

from celery_claim.app import claim_tasks, database_for, state_of
from celery_claim.exceptions import ClaimError, ConfigurationError
from celery_claim.outages import Outage
from celery_claim.schedules import FIRE_QUEUE, FIRE_TASK

if TYPE_CHECKING:
    from celery_claim.tasks import ClaimTask

logger = logging.getLogger(__name__)

#: A worker that finds its configuration unusable ends with this code (sysexits.h: EX_CONFIG).
EXIT_CONFIGURATION = 78


def arm(app: celery.Celery) -> None:
    """Add our steps and the task of windows to an app."""
    app.steps["worker"].add(CheckStep)
    app.steps["worker"].add(MaintenanceStep)
    app.steps["consumer"].add(WindowQueueStep)
    # Straight into the registry: this happens while the app finalizes, and app.tasks would finalize it again.
    registry: Any = app._tasks  # type: ignore[attr-defined]
    if FIRE_TASK not in registry:
        fire = type("fire", (FireTask,), {"app": app, "__module__": __name__})()
        registry[FIRE_TASK] = fire
        fire.bind(app)


class FireTask(celery.Task):  # type: ignore[type-arg]
    """Opens a window: sends one message per consumer to the task's own queue."""

    name = FIRE_TASK
    queue = FIRE_QUEUE
    ignore_result = True
    typing = False

    def run(self, window: dict[str, Any]) -> int:
        """Returns how many consumers were sent for. Raises LookupError for a task that is not registered."""
        if not window["enabled"]:
            return 0
        task = self.app.tasks.get(window["task"])
        if task is None:
            raise LookupError(f"window {window['name'] or window['task']}: no task {window['task']!r} is registered")
        consumers: int = min(window["concurrency"], state_of(self.app).settings.max_concurrency)
        for number in range(consumers):
            claim = {"consumer_id": number, "consumers": consumers, "max_run_time": window["max_run_time"]}
            route = {"queue": window["queue"]} if window["queue"] else {}
            task.apply_async(args=window["args"], kwargs={**window["kwargs"], "claim": claim}, **route)
        return consumers


class CheckStep(bootsteps.Step):
    """Refuses to start a worker on tables or settings that cannot work; a database that is down may come back."""

    name = "claim-check"
    label = "claim check"

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        try:
            _create_tables(parent.app)
            refused = [finding for task in claim_tasks(parent.app) for finding in _checked(task)]
        except ConfigurationError as error:
            logger.critical("%s", error)
            refused = [error]
        if refused:
            raise SystemExit(EXIT_CONFIGURATION)


def _create_tables(app: celery.Celery) -> None:
    settings = state_of(app).settings
    if settings.database_url is None or not settings.create_tables or not any(claim_tasks(app)):
        return
    from celery_claim.claims.sql.create import create_version_table

    try:
        create_version_table(database_for(app, "celery_claim"), settings.table_prefix, settings.table_schema)
    except ClaimError as error:
        # Nothing that runs needs the table; whatever is wrong with the database, the check says it better.
        logger.info("celery_claim's own tables were not made: %s", error)


def _checked(task: ClaimTask) -> list[Any]:
    """Log what check finds; returns the errors among it."""
    errors = []
    for finding in task.check():
        fatal = finding.level == "error"
        logger.log(logging.CRITICAL if fatal else logging.WARNING, "%s: %s", task.name, finding)
        if fatal:
            errors.append(finding)
    return errors


class WindowQueueStep(bootsteps.StartStopStep):
    """Consumes the queue of `celery_claim.fire`, whatever -Q says."""

    name = "claim-window-queue"
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        if any(claim_tasks(parent.app)):
            parent.add_task_queue(FIRE_QUEUE)


class MaintenanceStep(bootsteps.StartStopStep):
    """Recover and promote in every worker: no beat and no message is needed, and it cannot be forgotten.

    Several workers doing it at once are harmless.
    """

    name = "claim-maintenance"
    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._maintenance: Maintenance | None = None

    def start(self, parent: Any) -> None:
        tasks = list(claim_tasks(parent.app))
        if tasks:
            _prepare(tasks)
            self._maintenance = Maintenance(tasks, state_of(parent.app).settings.maintenance_interval)
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
    importlib.import_module("celery_claim.claims.recover")
    importlib.import_module("celery_claim.rows.consume")
    for task in tasks:
        with suppress(ClaimError):  # a database that is down; its check has said so
            task.claims.statements.named()


class Maintenance(threading.Thread):
    """Gives rows of dead owners back and makes due retries claimable, every few seconds."""

    def __init__(self, tasks: list[ClaimTask], interval: float) -> None:
        super().__init__(name="celery_claim-maintenance", daemon=True)
        self._tasks = tasks
        self._interval = interval
        self._over = threading.Event()
        self._outages = {task.name: Outage(f"maintenance of {task.name}", logger) for task in tasks}

    def run(self) -> None:
        # Not all workers of a fleet in the same instant, and not before their first interval: a restart is no crash.
        while not self._over.wait(self._interval * random.uniform(0.8, 1.2)):
            for task in self._tasks:
                self._maintain(task)

    def stop(self) -> None:
        """End after the statement that is running."""
        self._over.set()

    def _maintain(self, task: ClaimTask) -> None:
        outage = self._outages[task.name]
        try:
            task.recover()
            task.promote()
        except ClaimError as error:
            outage.failed(error)
        except Exception as error:
            # This thread is all that brings rows of dead workers back.
            logger.exception("maintenance of %s failed", task.name)
            outage.failed(error)
        else:
            outage.worked()
