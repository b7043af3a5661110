"""What the plugin adds to a Celery worker: a check at start, its entry in the register, its queues, and maintenance."""

from __future__ import annotations

from typing import Any

import celery
from celery.signals import worker_init

from celery_claim.bootsteps.check import EXIT_CONFIGURATION, CheckStep
from celery_claim.bootsteps.fire import FireTask
from celery_claim.bootsteps.maintenance import MaintenanceStep
from celery_claim.bootsteps.node import NodeQueueStep, NodeStep
from celery_claim.bootsteps.streams import StreamsStep
from celery_claim.schedules import FIRE_TASK

__all__ = ["EXIT_CONFIGURATION", "arm"]


@worker_init.connect(weak=False)
def _answer_inspect(**_: Any) -> None:
    """Workers know `celery inspect claim_windows`; for the command line, celery_claim.bin does the same."""
    import celery_claim.control  # noqa: F401


def arm(app: celery.Celery) -> None:
    """Add our steps and the task of windows to an app."""
    app.steps["worker"].update((CheckStep, NodeStep, MaintenanceStep))
    app.steps["consumer"].update((NodeQueueStep, StreamsStep))
    # Straight into the registry: this happens while the app finalizes, and app.tasks would finalize it again.
    registry: Any = app._tasks  # type: ignore[attr-defined]
    if FIRE_TASK not in registry:
        fire = type("fire", (FireTask,), {"app": app, "__module__": __name__})()
        registry[FIRE_TASK] = fire
        fire.bind(app)
