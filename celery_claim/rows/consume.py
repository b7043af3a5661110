"""One consumer at work: claim a batch, process its rows, write back, until there is nothing left to do.

No transaction is open and no lock is held while a handler runs. Whatever ends the run (the window, a shutdown, an
error, a time limit), finished rows are written back first and the rest is handed back at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from celery_claim.backoff import full_jitter
from celery_claim.claims.claim import Claim, claim
from celery_claim.claims.recover import blame, promote
from celery_claim.claims.renew import Held, renewer_of
from celery_claim.claims.sql.load import Unreadable, count_getter, names_of_values
from celery_claim.claims.sql.statements import Statements
from celery_claim.claims.write_back import WriteBack, release
from celery_claim.database import Database, persistently
from celery_claim.exceptions import ClaimError, Contention, DatabaseUnavailable
from celery_claim.rows.process import Judge, RetryPolicy, Verdict, process, process_batch
from celery_claim.rows.report import Counts, Observer, Report
from celery_claim.rows.transact import transact
from celery_claim.states import Status

logger = logging.getLogger(__name__)

#: How many claims in a row may win nothing before a windowed run leaves the few rows to the faster consumers.
LOST_RACES = 5
#: Outcomes that are written together at the latest.
BATCH_WRITE_BACK = 100
#: How long to try to give rows back through faults of the database.
RELEASE_SECONDS = 2.0
#: Due retries that a run makes claimable before it starts; the maintenance does the rest.
PROMOTED_AT_START = 1000


@dataclass(frozen=True)
class Place:
    """Where a consumer stands among those of its window."""

    consumer_id: int = 0
    #: Number of this consumer over all nodes; it chooses where a claim starts to look, and divides nothing.
    ordinal: int = 0
    consumers: int = 1


@dataclass(frozen=True)
class Options:
    """How rows of one task are consumed."""

    batch_size: int = 20
    lease_seconds: int | None = 600
    row_time_limit: float | None = None
    #: A row whose handler runs into a time limit, or ends the process, is counted like one that lost its owner.
    counts_interruptions: bool = False
    max_reclaims: int | None = 5
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    #: The handler gets a list of rows.
    in_batches: bool = False
    #: Outcomes are written together instead of row by row.
    write_back_in_batches: bool = False
    #: The handler gets a row and a session whose transaction the write back belongs to.
    transactional: bool = False
    skip_locked: bool = False
    #: End the run when that share of that many last rows raised something unexpected.
    failure_breaker: tuple[int, float] | None = (50, 0.8)


@dataclass
class Pace:
    """Seconds a row takes, as measured by the runs of this process."""

    seconds: float | None = None

    def saw(self, rows: int, seconds: float) -> None:
        each = seconds / rows
        self.seconds = each if self.seconds is None else 0.7 * self.seconds + 0.3 * each

    def fitting(self, cap: int, time_left: float) -> int:
        """How many rows to claim: never so many that some would have to be given back when the time is over."""
        if math.isinf(time_left):
            return cap
        if self.seconds is None:
            return 1
        return max(1, min(cap, int(time_left / max(self.seconds, 1e-9))))


class Breaker:
    """Opens when too large a share of the last rows raised something unexpected."""

    def __init__(self, rows: int, share: float) -> None:
        self._last: deque[bool] = deque(maxlen=rows)
        self._unexpected = 0
        self._bound = share * rows
        self.open = False

    def saw(self, unexpected: bool) -> None:
        if len(self._last) == self._last.maxlen:
            self._unexpected -= self._last[0]
        self._last.append(unexpected)
        self._unexpected += unexpected
        self.open = len(self._last) == self._last.maxlen and self._unexpected >= self._bound


class Consumer:
    """One run of a task over its table."""

    def __init__(
        self,
        database: Database,
        statements: Statements,
        options: Options,
        handler: Callable[..., Any],
        observer: Observer,
        *,
        worker_id: str,
        place: Place | None = None,
        pace: Pace | None = None,
        deadline: float = math.inf,
        limit: int | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`deadline` (time.monotonic()) is when the run stops starting rows; `limit` how many it claims at most."""
        self._database = database
        self._statements = statements
        self._options = options
        self._handler = handler
        self._worker_id = worker_id
        self._place = place or Place()
        self._pace = pace or Pace()
        self.deadline = deadline
        self._limit = math.inf if limit is None else limit
        self._should_stop = should_stop
        self._report = Report(observer)
        self._judge = Judge(
            options.retry, count_getter(statements.of, "retry_count"), partial(names_of_values, statements)
        )
        self._lost_owners = count_getter(statements.of, "reclaim_count")
        self._renewer = renewer_of(database)
        self._link = database.link()
        self._kept: list[tuple[Held, list[Any], bool]] = []
        self._claims = self._lost_races = 0
        self._look_at_head = False
        self._breaker = Breaker(*options.failure_breaker) if options.failure_breaker else None
        self._started_at = time.monotonic()
        #: The run ended because there was nothing left to claim.
        self.exhausted = False

    def run(self) -> Counts:
        """Work until no row is claimable, or the deadline, the limit, a stop or the breaker ends the run.

        Raises DatabaseUnavailable or StatementRefused when the table cannot be worked on; no row's status tells of it.
        """
        try:
            promote(self._link, self._statements, limit=PROMOTED_AT_START)
            while self._may_claim() and not self.exhausted:
                self.exhausted = not self._drain_batch()
        finally:
            self._give_back_kept()
            self._link.close()
        return self.counts()

    def counts(self) -> Counts:
        """What the run has done so far."""
        return self._report.counts(time.monotonic() - self._started_at)

    @property
    def consumer_id(self) -> int:
        return self._place.consumer_id

    def stopping(self) -> bool:
        """Whether no further row may be started."""
        return time.monotonic() >= self.deadline or self._should_stop()

    # ---- claim

    def _may_claim(self) -> bool:
        return self._report.claimed_rows < self._limit and not self.broken and not self.stopping()

    def _drain_batch(self) -> bool:
        """Claim, process and write back a batch; False when there is nothing more to claim."""
        try:
            claimed = self._claim()
        except Contention as error:
            logger.info("a claim on %s was rolled back, trying again: %s", self._statements.of.name, error)
            return self._race_lost()
        if not claimed.rows:
            return claimed.candidates > 0 and self._race_lost()
        self._lost_races = 0
        self._work_on(claimed)
        return True

    def _claim(self) -> Claim:
        offset = self._offset()
        self._claims += 1
        claimed = self._claim_at(offset)
        if offset and not claimed.candidates:
            # The backlog is shorter than our offset; it is empty only when its head is.
            claimed = self._claim_at(0)
        self._look_at_head = not claimed.rows
        return claimed

    def _claim_at(self, offset: int) -> Claim:
        return claim(
            self._link,
            self._statements,
            limit=int(min(self._pace.fitting(self._options.batch_size, self._time_left()), self._rows_left())),
            offset=offset,
            lease_seconds=self._options.lease_seconds,
            worker_id=self._worker_id,
            skip_locked=self._options.skip_locked,
        )

    def _offset(self) -> int:
        """How many candidates to leave to the consumers before us, so that eight do not race for the same twenty.

        Any consumer may take any row. Every so many claims each looks at the head: were the consumer with offset 0
        gone, the first rows would wait for ever.
        """
        place = self._place
        if place.consumers <= 1 or self._look_at_head or (self._claims + place.ordinal) % place.consumers == 0:
            return 0
        return place.ordinal * self._options.batch_size

    def _race_lost(self) -> bool:
        """Whether to try again after a claim in which others were faster."""
        self._lost_races += 1
        if self._lost_races >= LOST_RACES and not math.isinf(self.deadline):
            return False
        time.sleep(full_jitter(min(self._lost_races, 5)))
        return True

    def _time_left(self) -> float:
        return self.deadline - time.monotonic()

    def _rows_left(self) -> float:
        return self._limit - self._report.claimed_rows

    # ---- process

    def _work_on(self, claimed: Claim) -> None:
        held = Held(
            self._statements,
            claimed,
            lease_seconds=self._options.lease_seconds,
            row_time_limit=self._options.row_time_limit,
            locks_its_row=self._options.transactional,
            on_lost=self._report.lost,
            on_flushed=self._report.wrote,
            on_released=self._report.released,
        )
        self._renewer.hold(held)
        started_at = time.monotonic()
        try:
            self._report.claimed(claimed.rows)
            processed = self._process(held, self._with_one_suspect(held, claimed))
            if processed:
                self._flush(held)
                self._pace.saw(processed, time.monotonic() - started_at)
        except (SystemExit, SoftTimeLimitExceeded):
            if self._options.counts_interruptions and not self._should_stop():
                self._blame(held)
            raise
        finally:
            self._hand_back(held)

    def _with_one_suspect(self, held: Held, claimed: Claim) -> Claim:
        """The claim without all but one of the rows that have one try left.

        Of the rows that a dead owner had, one may be what killed it, and each is counted. Were they tried together for
        the last time, one poisonous row would take the others with it.
        """
        most = self._options.max_reclaims
        if not most:
            return claimed
        # One that cannot be decoded fails before any code of its task.
        suspects = [
            key
            for key, row in claimed.rows.items()
            if not isinstance(row, Unreadable) and self._lost_owners(row) >= most
        ]
        others = set(suspects[1:])
        if not others:
            return claimed
        # At once: a crash of the one that stays would count against them too.
        self._release(held, suspects[1:], counted=False)
        return replace(claimed, rows={key: row for key, row in claimed.rows.items() if key not in others})

    def _process(self, held: Held, claimed: Claim) -> int:
        """Process the rows of a claim until something ends the run; returns how many were started."""
        if self._options.in_batches:
            return self._process_together(held, claimed)
        processed = 0
        for key, row in claimed.rows.items():
            if not self.stopping() and not self.broken and held.start(key):
                self._process_row(held, key, row)
                processed += 1
        return processed

    def _process_row(self, held: Held, key: Any, row: Any) -> None:
        verdict: Verdict | WriteBack
        if self._options.transactional:
            verdict = transact(self._database, self._statements, held.token, key, row, self._handler, self._judge)
        else:
            verdict = process(row, self._handler, self._judge)
        if isinstance(verdict, WriteBack):
            self._saw(unexpected=False)
            held.settle([key])
            self._report.wrote(verdict)
            held.finish()
        else:
            held.finish()
            self._note(held, key, verdict)
            self._flush_when_due(held)

    def _process_together(self, held: Held, claimed: Claim) -> int:
        if self.stopping() or not held.start(*claimed.rows):
            return 0
        verdicts = process_batch(claimed.rows, self._handler, self._judge)
        held.finish()
        for key, verdict in verdicts.items():
            self._note(held, key, verdict)
        self._flush_when_due(held)
        return len(verdicts)

    @property
    def broken(self) -> bool:
        """Whether so many of the last rows raised something unexpected that going on would only waste the rest."""
        return self._breaker is not None and self._breaker.open

    def _saw(self, *, unexpected: bool) -> None:
        if self._breaker is not None:
            self._breaker.saw(unexpected)

    # ---- write back

    def _note(self, held: Held, key: Any, verdict: Verdict) -> None:
        """Put what became of a row where it will be written from."""
        self._saw(unexpected=verdict.unexpected)
        outcome = verdict.outcome
        if held.is_lost(key):
            return
        if outcome is None:
            self._keep(held, key, counted=False)
        elif outcome.status is Status.RETRYING and not self._statements.of.delays:
            self._keep(held, key, counted=True)
        else:
            # Into the buffer first, also when it is written at once: whatever strikes in between, a finished row is
            # written before the rest is handed back, and never handed back itself.
            held.buffer.add(key, outcome)

    def _flush_when_due(self, held: Held) -> None:
        """Write what was noted: at once, or when there is enough of it to be written together."""
        together = self._options.write_back_in_batches or self._options.in_batches
        if not together or len(held.buffer) >= BATCH_WRITE_BACK:
            self._flush(held)

    def _keep(self, held: Held, key: Any, *, counted: bool) -> None:
        """Keep a row until the run ends, and give it back then: at once, this run would claim it again."""
        self._kept.append((held, [key], counted))

    def _flush(self, held: Held) -> None:
        """Write what is in the buffer, trying through faults of the database for as long as the rows are ours."""
        try:
            result = persistently(lambda: held.flush(self._link), until=held.expires_at)
        except (DatabaseUnavailable, Contention) as error:
            # The lease is over and so is our claim on the rows; whoever gets them next does them again.
            logger.error("results of rows of %s were never written: %s", self._statements.of.name, error)
            given_up = held.buffer.give_up()
            held.settle(given_up.lost)
            self._report.wrote(given_up)
            raise
        self._report.wrote(result)

    # ---- hand back

    def _hand_back(self, held: Held) -> None:
        """Give the rows back that were not started; what was kept for the end of the run stays held."""
        kept = {key for each, keys, _ in self._kept if each is held for key in keys}
        try:
            if len(held.buffer):
                self._flush(held)
            self._release(held, [key for key in held.open if key not in kept], counted=False)
        finally:
            # Also when a second signal strikes here: nobody will work on these rows, and as long as this process
            # lives and renews them nobody else can.
            if not kept:
                self._renewer.drop(held)

    def _blame(self, held: Held) -> None:
        """Give back the row whose handler ran out of time or ended the process, counted like the loss of an owner."""
        keys = list(held.current)
        held.settle(keys)
        with suppress(ClaimError):  # it comes back when its lease ends, and is counted then
            blamed = blame(self._link, self._statements, held.token, keys, max_reclaims=self._options.max_reclaims)
            logger.error("rows %r of %s ended their run before they were done", keys, self._statements.of.name)
            self._report.released(len(keys), [key for key in keys if key not in blamed])

    def _give_back_kept(self) -> None:
        try:
            for held, keys, counted in self._kept:
                self._release(held, [key for key in keys if key in set(held.open)], counted=counted)
        finally:
            for held, _, _ in self._kept:
                self._renewer.drop(held)

    def _release(self, held: Held, keys: list[Any], *, counted: bool) -> None:
        if not keys:
            return
        held.settle(keys)
        try:
            # Tried again: a connection that lay idle under a long handler is often gone, and a row whose lease never
            # ends would stay in progress for good.
            lost = persistently(
                lambda: release(self._link, self._statements, held.token, keys, counted=counted),
                until=time.monotonic() + RELEASE_SECONDS,
            )
        except ClaimError as error:
            logger.warning(
                "rows %r of %s could not be given back, they come back when their lease ends: %s",
                keys,
                self._statements.of.name,
                error,
            )
        else:
            self._report.released(len(keys), lost)
