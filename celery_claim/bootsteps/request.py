"""Tasks that tell their worker how they ended."""

from __future__ import annotations

from typing import Any

from celery.exceptions import Ignore, Reject, Retry
from celery.worker.request import Request

from celery_claim.standing import Standing, standing_of


class CountedRequest(Request):
    """A request of a task. It lives in the worker's main process, under every pool.

    Celery makes a class of each task's request and replaces on_success in it, so successes cannot be counted where they
    happen: they are what was accepted and neither runs nor ended in another way.
    """

    def on_accepted(self, pid: Any, time_accepted: float) -> Any:
        self._standing.accepted += 1
        return super().on_accepted(pid, time_accepted)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        if isinstance(exc_info.exception, (Retry, Reject, Ignore)):
            self._standing.undecided += 1
        else:
            self._standing.fail += 1
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    @property
    def _standing(self) -> Standing:
        app: Any = self.app
        return standing_of(app)
