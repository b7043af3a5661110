"""Tasks that tell their worker how they ended."""

from __future__ import annotations

from typing import Any

from celery.worker.request import Request

from celery_claim.standing import Standing, standing_of


class CountedRequest(Request):
    """A request of a task. It lives in the worker's main process, under every pool."""

    def on_success(self, failed__retval__runtime: Any, **options: Any) -> Any:
        if not failed__retval__runtime[0]:  # else Celery goes on to on_failure
            self._standing.success += 1
        return super().on_success(failed__retval__runtime, **options)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        self._standing.fail += 1
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    @property
    def _standing(self) -> Standing:
        app: Any = self.app
        return standing_of(app)
