"""Say that something does not work: once, now and then while it lasts, and when it is over."""

from __future__ import annotations

import logging
import threading
import time


class Outage:
    """The trouble of one thing, such as a task's table; many threads may report to it."""

    #: Seconds between two lines about the same trouble.
    REPEAT_SECONDS = 60.0

    def __init__(self, what: str, logger: logging.Logger) -> None:
        self._what = what
        self._logger = logger
        self._lock = threading.Lock()
        self._since = 0.0
        self._said_at = 0.0
        self._kept_back = 0
        #: The last error in the server's words; None when the last try worked.
        self.error: str | None = None

    def failed(self, error: object) -> None:
        """A try failed."""
        with self._lock:
            now = time.monotonic()
            if self.error is None:
                self._since = now
            elif now - self._said_at < self.REPEAT_SECONDS:
                self._kept_back += 1
                self.error = str(error)
                return
            self.error = str(error)
            more = f" ({self._kept_back} more times since the last line)" if self._kept_back else ""
            self._said_at, self._kept_back = now, 0
        self._logger.error("%s does not work, trying again: %s%s", self._what, error, more)

    def worked(self) -> None:
        """A try worked."""
        if self.error is None:
            return
        with self._lock:
            if self.error is None:
                return
            self.error, seconds = None, time.monotonic() - self._since
        self._logger.warning("%s works again, after %.0f s", self._what, seconds)
