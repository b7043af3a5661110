"""The task that other schedulers send: it fires a window."""

from __future__ import annotations

import logging
from typing import Any

import celery

from celery_claim.exceptions import ClaimError
from celery_claim.schedules import FIRE_QUEUE, FIRE_TASK

logger = logging.getLogger(__name__)


class FireTask(celery.Task):  # type: ignore[type-arg]
    """Fires the window it is sent with, if nobody has fired its slot.

    However many of these messages wait, and however late they come: each looks at the slot that the database's clock
    is in now.
    """

    name = FIRE_TASK
    queue = FIRE_QUEUE
    ignore_result = True
    typing = False
    #: Messages of every few seconds must not push real tasks out of a monitor's memory.
    send_events = False

    def run(self, window: dict[str, Any]) -> str:
        """Returns the outcome, such as "fired" or "not_due". Raises LookupError for a task that is not registered."""
        from celery_claim.dispatch import Dispatcher

        if window["task"] not in self.app.tasks:
            raise LookupError(f"window {window['name'] or window['task']}: no task {window['task']!r} is registered")
        try:
            outcome = Dispatcher.of(self.app).fire_declared(window)
        except ClaimError as error:
            # The next slot's message comes by itself; a traceback for each would only fill the log.
            logger.error("window %s was not fired: %s", window["name"] or window["task"], error)
            return "error"
        return outcome.value
