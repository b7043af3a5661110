"""`celery beat -S claim`: windows by the database's clock, ordinary entries under a lease, any number of beats."""

from __future__ import annotations

import heapq
import logging
import time
from typing import Any

from celery.beat import Scheduler

from celery_claim.app import setup, state_of
from celery_claim.beat.entries import EntryKeeper
from celery_claim.beat.windows import LOOK_SECONDS, WindowClock
from celery_claim.bootsteps import EXIT_CONFIGURATION
from celery_claim.exceptions import ConfigurationError
from celery_claim.schedules import window_in

logger = logging.getLogger(__name__)


class ClaimScheduler(Scheduler):
    """Fires windows and sends ordinary entries; any number of them may run, and nothing is kept on disk."""

    max_interval = 5

    #: Name -> entry, but for windows.
    data: dict[str, Any]
    #: Entries in the order in which they are due; None: to be made anew.
    _heap: list[Any] | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """With lazy=True, as for the banner of `celery beat`, nothing is asked of any server."""
        self._windows: WindowClock | None = None
        self._entries: EntryKeeper | None = None
        super().__init__(*arguments, **options)

    def setup_schedule(self) -> None:
        """Read beat_schedule; ends the process with 78 for a configuration that cannot work."""
        try:
            self._set_up()
        except ConfigurationError as error:
            logger.critical("celery beat -S claim: %s", error)
            raise SystemExit(EXIT_CONFIGURATION) from None

    def _set_up(self) -> None:
        from celery_claim.checking import check_windows

        setup(self.app)
        settings = state_of(self.app).settings
        if settings.database_url is None:
            raise ConfigurationError("claim_database_url is not set: windows and last_run_at are kept in a database")
        if (self.app.conf.beat_max_loop_interval or 0) >= settings.lease_ttl:
            raise ConfigurationError(
                f"beat_max_loop_interval={self.app.conf.beat_max_loop_interval:g} is not less than claim_lease_ttl="
                f"{settings.lease_ttl:g}: the lease of ordinary entries would end between two looks"
            )
        for finding in check_windows(self.app):
            if finding.level == "error":
                raise ConfigurationError(finding.message)
            if finding.code != "fractional-frequency":  # no matter under this scheduler
                logger.error("%s", finding)
        self.install_default_entries(self.data)
        entries = dict(self.app.conf.beat_schedule or {})
        self.update_from_dict({name: entry for name, entry in entries.items() if window_in(entry) is None})
        self._windows = WindowClock(self.app)
        self._entries = EntryKeeper(self.app, self._plan_anew)

    def _plan_anew(self) -> None:
        """When entries are due is not what it was."""
        self._heap = None

    def tick(self, *arguments: Any, **options: Any) -> float:
        """Do what is due; returns the seconds until something is due next. Raises nothing of database or broker."""
        if self._windows is None or self._entries is None:
            return LOOK_SECONDS
        wait = min(self._windows.tick(), self._entries.wait(self.schedule))
        if self._entries.is_ours and not self._entries.is_resting:
            # The stock heap of due times; what it sends goes through apply_entry below.
            wait = min(wait, super().tick(*arguments, **options))
        return max(0.0, min(wait, self.max_interval or LOOK_SECONDS))

    def populate_heap(self, *arguments: Any, **options: Any) -> None:
        """The stock heap of due times; what could not be sent just now comes behind what else is due."""
        super().populate_heap(*arguments, **options)
        assert self._heap is not None
        assert self._entries is not None
        for place, event in enumerate(self._heap):
            wait = self._entries.postponed(event.entry.name)
            if wait > 0:
                at = self._when(event.entry, wait)  # type: ignore[attr-defined]
                self._heap[place] = event._replace(time=max(event.time, at))
        heapq.heapify(self._heap)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send a due entry, if it is still ours to send."""
        assert self._entries is not None
        following = self.schedule[entry.name]
        if not self._entries.claim(following):
            self._heap = None
            return
        logger.info("Sending due task %s (%s)", entry.name, entry.task)
        began = time.monotonic()
        try:
            self._entries.broker.attempt(lambda: self._send(entry), anew=self._entries.is_broker_well)
        except Exception as error:  # every broker has errors of its own
            self._entries.not_sent(entry.name, error, began)
            # As due as it was: the heap is made anew from it.
            self.schedule[entry.name] = entry
            self._heap = None
        else:
            self._entries.sent(entry.name)

    def _send(self, entry: Any) -> None:
        assert self._entries is not None
        with self._entries.broker.producer() as producer:
            self.apply_async(entry, producer=producer, advance=False, retry=False)

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **options: Any) -> Any:
        retrying = type(entry)(**{**dict(entry), "options": {**entry.options, **options}})
        return super().apply_async(retrying, producer=producer, advance=advance)

    @property
    def producer(self) -> None:  # type: ignore[override]
        # Stock beat connects here and waits for as long as the broker is away. Messages take a producer that waits for
        # a bounded time instead, and what cannot be sent is tried again.
        return None

    def close(self) -> None:
        """Let another beat take over at once."""
        try:
            super().close()
        finally:
            if self._entries is not None:
                self._entries.resign()

    @property
    def info(self) -> str:
        """What the banner of `celery beat` says."""
        return "    . windows -> database, no schedule file"
