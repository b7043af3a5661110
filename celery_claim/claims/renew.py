"""Keep the lease of rows that a live process holds, however long they take.

One thread per process and database, with a connection of its own, renews every lease/3 all rows that are not yet
written back, finished ones too. It stops last: rows that are being finished at shutdown are still ours.

A crash of the process ends the renewals, and `recover` gives the rows back when the lease is over. A process that was
frozen finds its leases expired by its own clock before it starts the next row, and the table refuses whatever it
still writes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from celery_claim.claims.claim import Claim
from celery_claim.claims.sql.statements import Statements
from celery_claim.claims.write_back import Buffer, WriteBack, release
from celery_claim.database import Database, Link, persistently
from celery_claim.exceptions import ClaimError, Contention

logger = logging.getLogger(__name__)

#: Outcomes that wait longer than this while a row is being worked on are written by the renewer.
FLUSH_SECONDS = 0.2
#: How long the renewer waits for a row lock: it has other rows to keep.
LOCK_WAIT_SECONDS = 1
#: How often the renewer looks whether something is due; a tenth of what it may be late for the shortest lease.
LOOK_SECONDS = 0.1
IDLE_SECONDS = 60.0


class Held:
    """Rows of one claim that this process has not written back yet."""

    def __init__(
        self,
        statements: Statements,
        claim: Claim,
        *,
        lease_seconds: int | None,
        row_time_limit: float | None = None,
        locks_its_row: bool = False,
        on_lost: Callable[[Sequence[Any]], None] = lambda keys: None,
        on_flushed: Callable[[WriteBack], None] = lambda result: None,
        on_released: Callable[[int, Sequence[Any]], None] = lambda rows, lost: None,
    ) -> None:
        """`locks_its_row`: the handler's own transaction may hold the current row, which keeps it ours as well."""
        self.statements = statements
        self.token = claim.token
        self.buffer = Buffer(statements, claim.token)
        self.lease_seconds = lease_seconds
        self._row_time_limit = row_time_limit
        self._locks_its_row = locks_its_row
        self._on_lost = on_lost
        self._on_flushed = on_flushed
        self._on_released = on_released
        self._lock = threading.Lock()
        # Held while outcomes are written and their rows settled: a renewal that comes back short in that instant must
        # not take a row that has just been written back for a lost one.
        self._writing = threading.Lock()
        self._open = set(claim.rows)
        self._lost: set[Any] = set()
        self._renewed_at = claim.sent_at
        self._current: tuple[Any, ...] = ()
        self._started_at = 0.0
        self._paused_until = 0.0

    @property
    def name(self) -> str:
        """The table, for the log."""
        return self.statements.of.name

    @property
    def expires_at(self) -> float:
        """time.monotonic() at which the rows may belong to somebody else."""
        return self._renewed_at + self.lease_seconds if self.lease_seconds is not None else float("inf")

    def start(self, *keys: Any) -> bool:
        """Whether all of these rows are still ours and may be started now; if so they are the current ones."""
        now = time.monotonic()
        with self._lock:
            if now >= self.expires_at or not self._open.issuperset(keys):
                return False
            self._current, self._started_at = keys, now
            return True

    def finish(self) -> None:
        """Nothing is being worked on; the rows stay ours until they are settled."""
        self._current = ()

    def flush(self, link: Link) -> WriteBack:
        """Write the outcomes in the buffer; after an error they are still in it."""
        with self._writing:
            result = self.buffer.flush(link)
            self.settle([*result.written, *result.lost])
            return result

    def is_lost(self, key: Any) -> bool:
        """Whether a renewal found the row in other hands; it has been reported then."""
        return key in self._lost

    def settle(self, keys: Iterable[Any]) -> None:
        """Forget rows that are written back, released or lost."""
        with self._lock:
            self._open.difference_update(keys)

    @property
    def current(self) -> tuple[Any, ...]:
        """The rows that are being worked on."""
        return self._current

    @property
    def open(self) -> list[Any]:
        with self._lock:
            return sorted(self._open)

    # ---- the renewer's side

    def due(self) -> float:
        """time.monotonic() at which the renewer has to look at this claim again."""
        with self._lock:
            never = float("inf")
            renewal = never if self.lease_seconds is None else self._renewed_at + self.lease_seconds / 3
            overrun = self._started_at + (self._row_time_limit or never) if self._current else never
            return max(self._paused_until, min(self.buffer.oldest + FLUSH_SECONDS, renewal, overrun))

    def pause(self) -> None:
        """Leave this claim alone for a moment after a fault."""
        self._paused_until = time.monotonic() + min(1.0, (self.lease_seconds or 60) / 6)

    def keep(self, link: Link) -> None:
        """Renew, write outcomes that waited long enough, let go of a row that overran its limit."""
        now = time.monotonic()
        # The leases first: an outcome that the table will not take must not cost its neighbours theirs.
        if self.lease_seconds is not None and now >= self._renewed_at + self.lease_seconds / 3:
            self._renew(link)
        if now >= self.buffer.oldest + FLUSH_SECONDS:
            self._on_flushed(self.flush(link))
        self._let_go(link, now)

    def _let_go(self, link: Link, now: float) -> None:
        """Stop renewing rows that ran past their limit, and give the rows behind them to other workers."""
        with self._lock:
            limit, stuck = self._row_time_limit, self._current
            if limit is None or not stuck or now < self._started_at + limit:
                return
        # What is finished is written before the rest goes back, or it would be done again.
        self._on_flushed(self.flush(link))
        with self._lock:
            if self._current is not stuck:  # it ended meanwhile
                return
            self._current = ()
            self._open.difference_update(stuck)
            behind = sorted(self._open)
            self._open.clear()
        logger.error(
            "row %s of %s ran longer than row_time_limit=%g s: its lease is not renewed any more",
            ", ".join(map(repr, stuck)),
            self.statements.of.name,
            limit,
        )
        try:
            lost = release(link, self.statements, self.token, behind)
        except ClaimError:
            # Ours again, and so renewed, until the consumer can give them back.
            with self._lock:
                self._open.update(behind)
            raise
        self._on_released(len(behind), lost)

    def _renew(self, link: Link) -> None:
        sent_at = time.monotonic()
        keys = self.open
        if keys:
            try:
                lost = _renewed(link, self.statements, self.token, keys)
            except Contention:
                lost = self._renew_each(link, keys)
            self._lose(lost)
        # Only now: a renewal that met a lost connection is still due, and is tried again at once.
        self._renewed_at = sent_at

    def _lose(self, keys: Sequence[Any]) -> None:
        """Report rows that are in other hands, but for those whose write back is to tell."""
        with self._writing, self._lock:
            undecided = self._current if self._locks_its_row else ()
            lost = [key for key in keys if key in self._open and key not in self.buffer and key not in undecided]
            self._open.difference_update(lost)
            self._lost.update(lost)
        if lost:
            self._on_lost(lost)

    def _renew_each(self, link: Link, keys: Sequence[Any]) -> list[Any]:
        """Renew row by row, because somebody holds a lock on some; a locked row cannot be recovered either."""
        lost: list[Any] = []
        locked: list[Any] = []
        for key in keys:
            try:
                lost += _renewed(link, self.statements, self.token, [key])
            except Contention:
                locked.append(key)
        if [key for key in locked if not (self._locks_its_row and key in self._current)]:
            logger.warning("rows %r of %s are locked by another transaction", locked, self.statements.of.name)
        return lost


def _renewed(link: Link, statements: Statements, token: str, keys: Sequence[Any]) -> list[Any]:
    """Renew rows; returns those that are not ours any more."""
    parameters = {"keys": keys, "token": token}
    result = link.execute(statements.renew, parameters)
    if not result.returns_rows and result.rowcount == len(keys):
        return []
    # A driver without FOUND_ROWS counts changed rows only, and a second renewal within one second changes nothing.
    ours = set(result.scalars() if result.returns_rows else link.execute(statements.won_keys, parameters).scalars())
    return [key for key in keys if key not in ours]


class Kept(Protocol):
    """Something that is ours as long as it is renewed: the rows of a claim, or a run of a window."""

    @property
    def name(self) -> str:
        """What it is, for the log."""

    def due(self) -> float:
        """time.monotonic() at which to look after it again."""

    def keep(self, link: Link) -> None:
        """Look after it; may raise ClaimErrors."""

    def pause(self) -> None:
        """The last try failed; the next is not at once."""


class Renewer:
    """The thread that keeps everything of one process on one database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._held: set[Kept] = set()
        self._thread: threading.Thread | None = None

    def hold(self, held: Kept) -> None:
        """Keep it until `drop`."""
        with self._lock:
            self._held.add(held)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="celery_claim-renewer", daemon=True)
                self._thread.start()

    def drop(self, held: Kept) -> None:
        with self._lock:
            self._held.discard(held)

    def _run(self) -> None:
        idle_since = time.monotonic()
        with self._database.linked(lock_wait_seconds=LOCK_WAIT_SECONDS) as link:
            while not self._ended(idle_since):
                # Looks instead of being told: a claim is due long after it is made, and telling this thread of each
                # would cost a fast consumer two changes of thread per batch.
                time.sleep(LOOK_SECONDS)
                for held in self._due():
                    self._keep(held, link)
                if self._held:
                    idle_since = time.monotonic()

    def _ended(self, idle_since: float) -> bool:
        """Whether nothing was held for so long that the thread, and its connection, may go."""
        with self._lock:
            if self._held or time.monotonic() < idle_since + IDLE_SECONDS:
                return False
            self._thread = None
            return True

    def _due(self) -> list[Kept]:
        now = time.monotonic()
        with self._lock:
            due = [(held.due(), held) for held in self._held]
        return [held for at, held in sorted(due, key=lambda each: each[0]) if at <= now]

    def _keep(self, held: Kept, link: Link) -> None:
        try:
            # Tried twice: the first statement after a pause often finds that the server has closed the connection.
            persistently(lambda: held.keep(link), until=time.monotonic() + LOCK_WAIT_SECONDS)
        except ClaimError as error:
            logger.warning("leases of %s could not be renewed: %s", held.name, error)
            held.pause()
        except Exception:
            # Without this thread every row of the process would lose its lease.
            logger.exception("the renewer of %s failed", held.name)
            held.pause()


_renewers: weakref.WeakKeyDictionary[Database, Renewer] = weakref.WeakKeyDictionary()
_renewers_lock = threading.Lock()


def renewer_of(database: Database) -> Renewer:
    """The renewer of this process for a database."""
    with _renewers_lock:
        renewer = _renewers.get(database)
        if renewer is None:
            renewer = _renewers[database] = Renewer(database)
        return renewer


def _forget_renewers() -> None:
    # The threads stayed in the parent, and so did what they keep.
    global _renewers_lock
    _renewers_lock = threading.Lock()
    _renewers.clear()


os.register_at_fork(after_in_child=_forget_renewers)
