"""Fires windows when their slots begin by the database's clock."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from celery_claim.exceptions import ClaimError
from celery_claim.outages import Outage

logger = logging.getLogger(__name__)

#: Seconds between two looks at the table of windows, which tell what was changed at run time, and the time.
LOOK_SECONDS = 5.0
#: Seconds until what did not work, or a window that could not open, is tried again.
RETRY_SECONDS = 1.0


class WindowClock:
    """Fires windows when their slots begin by the database's clock."""

    def __init__(self, app: Any) -> None:
        from celery_claim.dispatch import Dispatcher

        self._dispatcher = Dispatcher.of(app)
        self._definitions = self._dispatcher.declared()
        self._outage = Outage("firing windows", logger)
        self._registered = False
        #: Milliseconds since 1970 by the database's clock, at time.monotonic() == 0.
        self._epoch = 0.0
        self._frequencies: dict[str, int] = {}
        #: Window -> time.monotonic() of the next try to fire it.
        self._due: dict[str, float] = {}
        self._look_at = 0.0

    def tick(self) -> float:
        """Fire what is due; returns the seconds until something is due next."""
        if not self._definitions:
            return math.inf
        try:
            self._fire_due()
        except ClaimError as error:
            self._failed(error)
        except Exception as error:
            logger.exception("firing windows failed")
            self._failed(error)
        else:
            self._outage.worked()
        return min([self._look_at, *self._due.values()]) - time.monotonic()

    def _failed(self, error: Exception) -> None:
        self._outage.failed(error)
        self._look_at = time.monotonic() + RETRY_SECONDS
        self._due.clear()

    def _fire_due(self) -> None:
        if time.monotonic() >= self._look_at:
            self._look()
        now = time.monotonic()
        due = [name for name, at in self._due.items() if at <= now]
        # Until half of its slot has passed, a window waits for a node; then its slot is missed.
        patient = [name for name in due if self._into_slot(name, now) < self._frequencies[name] / 2]
        for names, is_patient in ((patient, True), ([name for name in due if name not in patient], False)):
            if names:
                self._fire(names, patient=is_patient)

    def _fire(self, names: list[str], *, patient: bool) -> None:
        from celery_claim.windows.fire import Outcome

        outcomes = self._dispatcher.fire(names, patient=patient)
        now = time.monotonic()
        for name, outcome in outcomes.items():
            if outcome is Outcome.OCCUPIED or (outcome is Outcome.NO_NODE and patient):
                self._due[name] = now + RETRY_SECONDS
            elif outcome in (Outcome.FIRED, Outcome.BUSY, Outcome.NO_NODE):
                self._due[name] = now + (self._frequencies[name] - self._into_slot(name, now)) / 1000
            else:
                # Another beat was faster, or our idea of the time is a little ahead, or somebody paused it: look.
                self._due.pop(name)
                self._look_at = now if outcome is not Outcome.PAUSED else min(self._look_at, now + RETRY_SECONDS)
                self._registered &= outcome is not Outcome.UNKNOWN

    def _look(self) -> None:
        from celery_claim.windows.slots import next_fire

        if not self._registered:
            # Once: in the middle of a deploy the beats of two versions would write theirs in turn.
            self._dispatcher.register(self._definitions)
            self._registered = True
        look = self._dispatcher.look()
        now = time.monotonic()
        self._epoch = look.now - now * 1000
        self._look_at = now + LOOK_SECONDS
        self._due.clear()
        for name, window in look.windows.items():
            if name in self._definitions and window.enabled:
                self._frequencies[name] = window.frequency
                self._due[name] = now + (next_fire(window, look.now) - look.now) / 1000

    def _into_slot(self, name: str, now: float) -> float:
        """Milliseconds since the slot of a window began."""
        return (self._epoch + now * 1000) % self._frequencies[name]
