"""The thread that keeps a consumer's promises while a task blocks everything else: renewal and acknowledgements."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from typing import TYPE_CHECKING

from celery_claim.streams.options import StreamOptions

if TYPE_CHECKING:
    from celery_claim.streams.lease import Leases

logger = logging.getLogger("celery_claim.streams")

#: Seconds between two tries when the server cannot be reached, and between two looks at a consumer that was left.
RETRY_SECONDS = 0.5
#: Seconds without an acknowledgement after which the thread sleeps until it is called.
BUSY_SECONDS = 0.1


class Keeper:
    """One daemon thread per consumer, started with the first message that it holds."""

    def __init__(self, leases: Leases, options: StreamOptions) -> None:
        self.leases, self.options = leases, options
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._asleep = False
        self._pid = os.getpid()

    def start(self) -> None:
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._keep, name="celery_claim-leases", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it unless it is the one that ends itself."""
        self._stopping = True
        self.look()
        if self._thread is not None and self._thread is not threading.current_thread():
            # No longer than that: it may be in the middle of a command that nobody answers.
            self._thread.join(RETRY_SECONDS)

    def look(self) -> None:
        """Something changed."""
        with self._changed:
            self._changed.notify()

    def expect_acks(self) -> None:
        """An acknowledgement waits. While they keep coming the thread looks unasked: a call for each costs more."""
        if self._asleep and os.getpid() == self._pid:
            self.look()

    def _keep(self) -> None:
        leases, answered, busy_until = self.leases, True, 0.0
        renew_at = time.monotonic() + self.options.renew_interval
        while not self._stopping:
            now = time.monotonic()
            renew = renew_at <= now
            if renew or leases.left or (leases.flush_at or math.inf) <= now:
                answered = self._work(renew=renew)
                if renew and answered:
                    renew_at = now + self.options.renew_interval
            look_at = renew_at
            if leases.left or not answered:
                look_at = now + RETRY_SECONDS
            elif leases.flush_at is not None or now < busy_until:
                busy_until = now + BUSY_SECONDS if leases.flush_at is not None else busy_until
                look_at = min(look_at, leases.flush_at or now + self.options.ack_delay)
            self._wait(look_at - now, asleep=leases.flush_at is None and now >= busy_until)

    def _wait(self, seconds: float, *, asleep: bool) -> None:
        with self._changed:
            self._asleep = asleep
            # Looked at after the flag is up: an acknowledgement that came before it called nobody.
            if seconds > 0 and not self._stopping and not (asleep and self.leases.flush_at is not None):
                self._changed.wait(seconds)
            self._asleep = False

    def _work(self, *, renew: bool) -> bool:
        leases = self.leases
        try:
            leases.flush()
            if leases.left:
                leases.let_go_of_dropped()
            if renew:
                leases.renew()
            if leases.left and leases.idle:
                leases.end()
        except Exception as error:
            # Nothing is forgotten: acknowledgements are kept, and leases last three more tries of renewal.
            logger.debug("leases are tried again in %s s: %s", RETRY_SECONDS, error)
            return False
        return True
