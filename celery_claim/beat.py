"""`celery beat -S claim`: windows by the database's clock, ordinary entries under a lease, any number of beats."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery.beat import Scheduler

from celery_claim.app import own_tables, setup, state_of
from celery_claim.bootsteps import EXIT_CONFIGURATION
from celery_claim.exceptions import ClaimError, ConfigurationError
from celery_claim.outages import Outage
from celery_claim.schedules import window_in

if TYPE_CHECKING:
    from celery_claim.database import Link
    from celery_claim.nodes.leases import Lease
    from celery_claim.windows.entries import Sending, Sent

logger = logging.getLogger(__name__)

#: Name of the lease under which one of the beats sends ordinary entries.
LEASE = "beat"
#: Seconds between two looks at the table of windows, which tell what was changed at run time, and the time.
LOOK_SECONDS = 5.0
#: Seconds until what did not work, or a window that could not open, is tried again.
RETRY_SECONDS = 1.0


class ClaimScheduler(Scheduler):
    """Fires windows and sends ordinary entries; any number of them may run, and nothing is kept on disk."""

    max_interval = 5

    #: Name -> entry, but for windows.
    data: dict[str, Any]

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
        if self._entries.is_ours and not self._entries.resting:
            # The stock heap of due times; what it sends goes through apply_entry below.
            wait = min(wait, super().tick(*arguments, **options))
        return max(0.0, min(wait, self.max_interval or LOOK_SECONDS))

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send a due entry, if it is still ours to send."""
        assert self._entries is not None
        following = self.schedule[entry.name]
        if not self._entries.claim(following):
            self._heap = None
            return
        logger.info("Sending due task %s (%s)", entry.name, entry.task)
        try:
            self.apply_async(entry, advance=False, retry=False)
        except Exception as error:  # every broker has errors of its own
            self._entries.not_sent(entry.name, error)
            # As due as it was: the heap is made anew from it.
            self.schedule[entry.name] = entry
            self._heap = None
        else:
            self._entries.sent(entry.name)

    def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **options: Any) -> Any:
        retrying = type(entry)(**{**dict(entry), "options": {**entry.options, **options}})
        return super().apply_async(retrying, producer=producer, advance=advance)

    @property
    def producer(self) -> None:  # type: ignore[override]
        # Stock beat connects here and waits for as long as the broker is away. Messages take a producer of the app's
        # pool instead, and what cannot be sent is tried again.
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


class EntryKeeper:
    """Keeps the lease of ordinary entries, and in the database when each was sent last."""

    def __init__(self, app: Any, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the table says of an entry something else than we thought."""
        from celery_claim.dispatch import Dispatcher
        from celery_claim.windows.sql.entries import EntryStatements

        self._app = app
        self._on_change = on_change
        self._dispatcher = Dispatcher.of(app)
        self._statements = EntryStatements(own_tables(app))
        self._ttl = state_of(app).settings.lease_ttl
        self._owner = uuid4().hex
        self._outage = Outage("the lease of ordinary entries", logger)
        self._broker = Outage("sending ordinary entries", logger)
        self._lease: Lease | None = None
        self._renew_at = self._rest_until = 0.0
        self._epoch = 0
        #: Entry -> when it was sent last, as the table says, and under which schedule it was looked up there.
        self._stored: dict[str, Sent] = {}
        self._schedules: dict[str, Any] = {}
        #: Entry -> a sending that is or may be written down, and whose message is not out. Whatever comes between, the
        #: table gets it back: before we hold the lease again, and at the latest when we resign.
        self._unsent: dict[str, Sending] = {}

    @property
    def is_ours(self) -> bool:
        """Whether this beat sends the ordinary entries."""
        return self._lease is not None

    @property
    def resting(self) -> bool:
        """Whether the broker did not take the last message just now."""
        return time.monotonic() < self._rest_until

    def wait(self, schedule: dict[str, Any]) -> float:
        """Keep or seek the lease when it is time; returns the seconds until it is time again."""
        if not schedule and not self._unsent:
            return math.inf
        if time.monotonic() >= self._renew_at or (self.is_ours and self._has_strangers(schedule)):
            self._guarded(lambda: self._renew(schedule))
        wake_at = min(self._renew_at, self._rest_until if self.resting else math.inf)
        return wake_at - time.monotonic()

    def claim(self, following: Any) -> bool:
        """Whether an entry is ours to send; `following`: the entry as it is after that."""
        from celery_claim.windows.entries import Sending, claim

        name, lease, claimed = following.name, self._lease, False
        if lease is None or name not in self._stored:
            # Added by another thread since the last look.
            self._renew_at = 0.0
            return False
        sending = Sending(name, self._stored[name], _milliseconds(following.last_run_at))

        def attempt() -> None:
            nonlocal claimed
            with self._dispatcher.database.linked() as link:
                claimed = claim(link, self._statements, lease, sending)

        self._unsent[name] = sending
        answered = self._guarded(attempt)
        if claimed:
            self._stored[name] = sending.after
            return True
        if answered:
            del self._unsent[name]
        # Deposed, or the database is away: look again who sends, and when it was sent.
        self._lease = None
        self._renew_at = min(self._renew_at, time.monotonic() + RETRY_SECONDS)
        return False

    def sent(self, name: str) -> None:
        """The message of a claimed entry is out."""
        self._unsent.pop(name, None)
        self._broker.worked()

    def not_sent(self, name: str, error: Exception) -> None:
        """The broker did not take the message of a claimed entry: it is as due as it was."""
        from celery_claim.windows.entries import undo

        self._broker.failed(error)
        self._rest_until = time.monotonic() + RETRY_SECONDS
        sending = self._unsent[name]
        self._stored[name] = sending.before

        def attempt() -> None:
            with self._dispatcher.database.linked() as link:
                stood = undo(link, self._statements, sending)
            del self._unsent[name]
            if not stood:
                # Somebody else has written since, perhaps as the next holder: look what.
                self._lease, self._renew_at = None, 0.0

        # Without an answer it stays among the unsent, and we without the lease until the table has it back.
        self._guarded(attempt)

    def resign(self) -> None:
        """Give the lease up, and back what was written down and did not go out."""
        from celery_claim.nodes.leases import release

        if self._lease is None and not self._unsent:
            return
        try:
            with self._dispatcher.database.linked() as link:
                self._take_back(link)
                release(link, own_tables(self._app).nodes, LEASE, self._owner)
        except ClaimError as error:
            for sending in self._unsent.values():
                logger.error("entry %s was due and could not be sent, and is not noted as due: %s", sending.name, error)
        self._lease = None

    def _has_strangers(self, schedule: dict[str, Any]) -> bool:
        """Whether an entry was added, or got another schedule, since we read the table."""
        return any(self._schedules.get(entry.name) is not entry.schedule for entry in schedule.values())

    def _renew(self, schedule: dict[str, Any]) -> None:
        from celery_claim.nodes.leases import acquire

        self._dispatcher.prepare()
        with self._dispatcher.database.linked() as link:
            # First of all, so that whoever gets the lease finds it: we, or another who reads the table anew by and by.
            self._take_back(link)
            self._unsent.clear()
            lease = acquire(link, own_tables(self._app).nodes, LEASE, self._owner, ttl_ms=round(self._ttl * 1000))
            if lease is not None:
                # Not only under a new epoch: an earlier holder may have given a sending back that it had claimed.
                self._load(link, list(schedule.values()))
                if lease.epoch != self._epoch:
                    self._epoch = lease.epoch
                    logger.info("this beat sends the ordinary entries now (epoch %d)", lease.epoch)
        self._lease = lease
        self._renew_at = time.monotonic() + self._ttl / 3

    def _take_back(self, link: Link) -> None:
        from celery_claim.windows.entries import undo

        for sending in list(self._unsent.values()):
            if undo(link, self._statements, sending):
                logger.info("entry %s is as due as it was before it could not be sent", sending.name)

    def _load(self, link: Link, entries: list[Any]) -> None:
        from celery_claim.windows.entries import load

        now = _milliseconds(self._app.now())
        stored = load(link, self._statements, {entry.name: repr(entry.schedule) for entry in entries}, now)
        for entry in entries:
            sent = stored[entry.name]
            at = datetime.fromtimestamp(sent.last_run_at / 1000, timezone.utc)
            entry.last_run_at, entry.total_run_count = at.astimezone(self._app.timezone), sent.total_run_count
        if stored != self._stored:
            self._on_change()
        self._stored = stored
        self._schedules = {entry.name: entry.schedule for entry in entries}

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Whether the work was done; else we are without the lease for a moment, and the log says why."""
        try:
            work()
        except ClaimError as error:
            self._failed(error)
        except Exception as error:
            logger.exception("the lease of ordinary entries failed")
            self._failed(error)
        else:
            self._outage.worked()
            return True
        return False

    def _failed(self, error: Exception) -> None:
        self._outage.failed(error)
        self._lease = None
        self._renew_at = time.monotonic() + RETRY_SECONDS


def _milliseconds(at: datetime) -> int:
    return int(at.timestamp() * 1000)
