"""Keeps the lease of ordinary entries, and what is noted of each sending until its message is out."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery.schedules import schedule

from celery_claim.app import own_tables, state_of
from celery_claim.backoff import exponential
from celery_claim.exceptions import ClaimError
from celery_claim.outages import Outage

if TYPE_CHECKING:
    from celery_claim.database import Link
    from celery_claim.nodes.leases import Lease
    from celery_claim.windows.entries import Sending, Sent

logger = logging.getLogger(__name__)

#: Name of the lease under which one of the beats sends ordinary entries.
LEASE = "beat"
#: Seconds until what did not work is tried again.
RETRY_SECONDS = 1.0
#: The longest time in seconds between two tries of an entry that cannot be sent, such as one with arguments that are
#: no JSON.
REFUSED_SECONDS = 10.0
#: Seconds by which an entry that met a broker that is away waits for the other entries' turn.
BEHIND_SECONDS = 0.1


class EntryKeeper:
    """Keeps the lease of ordinary entries, and in the database when each was sent last."""

    def __init__(self, app: Any, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the table says of an entry something else than we thought."""
        from celery_claim.dispatch import Dispatcher
        from celery_claim.windows.sql.entries import EntryStatements

        self._app = app
        self._on_change = on_change
        self._dispatcher = Dispatcher.of(app)
        self.broker = self._dispatcher.broker
        self._statements = EntryStatements(own_tables(app))
        self._ttl = state_of(app).settings.lease_ttl
        self._owner = uuid4().hex
        self._outage = Outage("the lease of ordinary entries", logger)
        self._sending = Outage("sending ordinary entries", logger)
        self._lease: Lease | None = None
        self._renew_at = 0.0
        self._epoch = 0
        #: Entry -> when it was sent last, as the table says, and under which schedule it was looked up there.
        self._stored: dict[str, Sent] = {}
        self._schedules: dict[str, Any] = {}
        #: Entry that was sent in the future, by a clock that was wrong or has been set back -> what the table says, and
        #: when the entry began anew.
        self._ahead: dict[str, tuple[Sent, int]] = {}
        #: Entry -> a sending that is or may be written down, and whose message is not out. Whatever comes between, the
        #: table gets it back: before we hold the lease again, and at the latest when we resign.
        self._unsent: dict[str, Sending] = {}
        #: Entry -> the trouble with its message alone, how often it was refused in a row, and the next try, in
        #: time.monotonic().
        self._refused: dict[str, Outage] = {}
        self._refusals: Counter[str] = Counter()
        self._not_before: dict[str, float] = {}

    @property
    def is_ours(self) -> bool:
        """Whether this beat sends the ordinary entries."""
        return self._lease is not None

    @property
    def is_broker_well(self) -> bool:
        """Whether the broker took the last message."""
        return self._sending.error is None

    @property
    def is_resting(self) -> bool:
        """Whether the broker did not answer just now."""
        return self.broker.rests

    def postponed(self, name: str) -> float:
        """Seconds until an entry that could not be sent is tried again."""
        return self._not_before.get(name, 0.0) - time.monotonic()

    def wait(self, schedule: dict[str, Any]) -> float:
        """Keep or seek the lease when it is time; returns the seconds until it is time again."""
        if not schedule and not self._unsent:
            return math.inf
        if time.monotonic() >= self._renew_at or (self.is_ours and self._has_strangers(schedule)):
            self._guarded(lambda: self._renew(schedule))
        wake_at = min(self._renew_at, self.broker.rests_until if self.is_resting else math.inf)
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
        self._not_before.pop(name, None)
        self._sending.worked()
        if name in self._refused:
            self._refused.pop(name).worked()
            del self._refusals[name]

    def not_sent(self, name: str, error: Exception, began: float) -> None:
        """The message of a claimed entry did not go out: the entry is as due as it was.

        `began`: when that was tried, in time.monotonic().
        """
        from celery_claim.windows.entries import undo

        self._postpone(name, error, began)
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

    def _postpone(self, name: str, error: Exception, began: float) -> None:
        if self.broker.is_away(error):
            self._sending.failed(error)
            self.broker.rest(began)
            # Behind the others, in case it is this message after all that the broker cannot stand.
            self._not_before[name] = self.broker.rests_until + BEHIND_SECONDS
        else:
            self._refused.setdefault(name, Outage(f"sending the entry {name}", logger)).failed(error)
            wait = exponential(self._refusals[name], base=RETRY_SECONDS, cap=REFUSED_SECONDS, jitter=False)
            self._refusals[name] += 1
            self._not_before[name] = time.monotonic() + wait

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
        ahead = {}
        for entry in entries:
            sent = stored[entry.name]
            begun = sent.last_run_at
            # A crontab waits until the clock is where it was, or it would send the same minute, or day, again.
            if begun > now and isinstance(entry.schedule, schedule):
                ahead[entry.name] = self._begin(entry.name, sent, now)
                begun = ahead[entry.name][1]
            at = datetime.fromtimestamp(begun / 1000, timezone.utc)
            entry.last_run_at, entry.total_run_count = at.astimezone(self._app.timezone), sent.total_run_count
        if (stored, ahead) != (self._stored, self._ahead):
            self._on_change()
        self._stored, self._ahead = stored, ahead
        self._schedules = {entry.name: entry.schedule for entry in entries}

    def _begin(self, name: str, sent: Sent, now: int) -> tuple[Sent, int]:
        """From when on an interval counts that was sent in the future: since we first saw that."""
        before = self._ahead.get(name)
        return before if before is not None and before[0] == sent and before[1] <= now else (sent, now)

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
