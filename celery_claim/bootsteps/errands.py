"""A thread for what must not hold up the worker's event loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Errands(threading.Thread):
    """Does one thing after another; `put` may be called from a signal handler and from any thread."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        # Looked up now: under gevent it is another class.
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def put(self, errand: Callable[[], None]) -> None:
        self._waiting.put(errand)

    def finish(self, timeout: float) -> None:
        """Do what is waiting, for at most `timeout` seconds, and end."""
        self._waiting.put(None)
        if self.is_alive() and self is not threading.current_thread():
            self.join(timeout)

    def run(self) -> None:
        while (errand := self._waiting.get()) is not None:
            try:
                errand()
            except Exception:
                logger.exception("%s failed", self.name)
