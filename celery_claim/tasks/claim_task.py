"""Mode A: row -> claim -> process -> write back, as a Celery task.

``send_mail.run(row)`` and ``send_mail(row)`` are the user's own function. ``send_mail.delay()``, ``apply_async()``,
``apply()`` and ``send_mail()`` are one drain of the table; a window's messages carry their place under ``claim=``.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from celery_claim import signals
from celery_claim.app import state_of
from celery_claim.exceptions import ConfigurationError
from celery_claim.options import where
from celery_claim.rows.outcomes import Retry, seconds_until
from celery_claim.states import Status
from celery_claim.stopping import worker_is_stopping
from celery_claim.tasks.row_signals import RowSignals
from celery_claim.tasks.table_task import TableTask

if TYPE_CHECKING:
    from celery_claim.claims.check import Finding
    from celery_claim.claims.table import Claims
    from celery_claim.rows.consume import Consumer, Options, Pace, Place
    from celery_claim.rows.report import Counts, Observer

logger = logging.getLogger(__name__)


class ClaimTask(TableTask):
    """A task that claims rows of a table, processes them, and writes back what became of them.

    Use it as ``@app.task(base=ClaimTask, model=Mail)`` on a function of one row, or subclass it with
    ``process(self, row)`` or ``process_batch(self, rows)``. All options are class attributes.
    """

    abstract = True

    #: Claim column -> its name in this table, where they differ.
    columns: Mapping[str, Any] = {}
    #: Status (or its name) -> its value in this table, where they differ. RETRYING, QUEUED and CANCELLED that are
    #: left out do not exist in this table.
    values: Mapping[Any, Any] | None = None

    #: How many rows to claim at once, at most.
    batch_size: int = 20
    #: Seconds a worker may be silent before another may take its rows; a live worker renews them. None: never.
    lease_seconds: int | None = 600
    #: Seconds after which a row is not renewed any more although its handler still runs.
    row_time_limit: float | None = None
    #: How many exceptions a row may raise and be run again; 0: it fails at the first; None: no limit.
    max_retries: int | None = 0
    #: Seconds before the first retry; doubled each time up to retry_backoff_max.
    retry_backoff: float = 5
    #: Seconds between two tries at most.
    retry_backoff_max: float = 3600
    #: Vary each wait by half of it, so that rows that failed together do not all come back in one second.
    retry_jitter: bool = True
    #: Exceptions after which a row is not run again.
    no_retry_for: tuple[type[BaseException], ...] = ()
    #: How many owners a row may lose before it fails: a row that kills its worker each time must not loop for ever.
    max_reclaims: int | None = 5
    #: "row": each result is written at once; "batch": up to 100 together, within 0.2 s.
    write_back: str = "row"
    #: The handler gets (row, session), and its writes and the row's success commit together or not at all.
    transactional: bool = False
    #: Claim with FOR UPDATE SKIP LOCKED on MySQL >= 8.0.1 or MariaDB >= 10.6: strict order, slower.
    skip_locked: bool = False
    #: (rows, share): end a run when that share of that many last rows raised something unexpected; None: never.
    failure_breaker: tuple[int, float] | None = (50, 0.8)

    # ---- calling

    def run(self, *arguments: Any, **named: Any) -> Any:
        """The user's own function: `process(row)` or `process_batch(rows)` of a class."""
        handle = self.process_batch if self.handles_batches() else self.process
        return handle(*arguments, **named)

    def process(self, row: Any) -> Any:
        """Handle one claimed row; it is detached, with all its columns loaded."""
        raise NotImplementedError("define process(self, row)")

    def process_batch(self, rows: list[Any]) -> Any:
        """Handle a batch of claimed rows; None, or key -> None, Done, Retry, Fail, Skip or an exception."""
        raise NotImplementedError("define process_batch(self, rows)")

    def __call__(self, *arguments: Any, claim: Mapping[str, Any] | None = None, **named: Any) -> Any:
        """With arguments the user's function; without, one drain: a Counts, or its dict as a worker's result.

        `claim` comes with the messages of windows: the run to take. One without a window asks for a single drain.
        """
        if claim is not None and "window" in claim:
            from celery_claim.running import run_window

            return run_window(self, claim)
        if claim is None and (arguments or named):
            return self.run(*arguments, **named)
        if claim is None and (self.request.called_directly or self.request.is_eager):
            return self.drain()
        return self._work(claim or {})

    def retry(self, *arguments: Any, **options: Any) -> Any:
        """Run the row again later; Celery's own would publish the whole run again."""
        named = dict(
            zip(("args", "kwargs", "exc", "throw", "eta", "countdown", "max_retries"), arguments, strict=False)
        )
        named |= options
        error = named.get("exc") or sys.exc_info()[1]
        reason = f"{type(error).__name__}: {error}" if error else None
        countdown, eta = named.get("countdown"), named.get("eta")
        raise Retry(seconds_until(eta) if countdown is None and eta else countdown, reason) from error

    # ---- the public verbs

    def drain(self, max_run_time: float | None = None, limit: int | None = None) -> Counts:
        """Work here and now, without worker or beat, until no row is claimable.

        `max_run_time`: seconds after which no further row is started; `limit`: rows claimed at most. The failure
        breaker is off. Raises DatabaseUnavailable or StatementRefused when the table cannot be worked on.
        """
        if max_run_time is not None and not 0 <= max_run_time < math.inf:
            raise ValueError(f"drain(max_run_time={max_run_time!r}): expected seconds >= 0, or None for no limit")
        if limit is not None and (type(limit) is not int or limit < 0):
            raise ValueError(f"drain(limit={limit!r}): expected a whole number >= 0, or None for no limit")
        deadline = math.inf if max_run_time is None else time.monotonic() + max_run_time
        return self._drain(deadline=deadline, limit=limit, in_worker=False)

    def recover(self, lease_seconds: int | None = None) -> list[Any]:
        """Give back the rows of dead owners; returns their keys. `lease_seconds` overrides the rows' own leases."""
        from celery_claim.claims.recover import recover

        if lease_seconds is not None and (type(lease_seconds) is not int or lease_seconds < 0):
            raise ValueError(f"recover(lease_seconds={lease_seconds!r}): expected whole seconds >= 0, or None")
        claims = self.claims
        with claims.linked(lock_wait_seconds=1) as link:
            keys = recover(
                link,
                claims.statements,
                lease_seconds=self.lease_seconds if lease_seconds is None else lease_seconds,
                override=lease_seconds is not None,
                max_reclaims=self.max_reclaims,
            )
        if keys:
            logger.warning("%s: %d rows of dead or silent owners were given back", self.name, len(keys))
            signals.rows_recovered.send(sender=self, keys=keys)
        return keys

    def promote(self) -> list[Any]:
        """Make retries that are due claimable; returns their keys."""
        from celery_claim.claims.recover import promote

        with self.claims.linked(lock_wait_seconds=1) as link:
            return promote(link, self.claims.statements)

    def release(self, keys: Sequence[Any]) -> list[Any]:
        """Give rows in progress back whoever owns them (their results will be refused); returns the keys changed."""
        from celery_claim.claims.recover import release_any

        with self.claims.linked() as link:
            return release_any(link, self.claims.statements, self._keys(keys))

    def retry_failed(self, keys: Sequence[Any] | str | None = None, error_like: str | None = None) -> list[Any]:
        """Make failed rows claimable with fresh counters; returns their keys.

        `keys`: a list, or "all". `error_like`: an SQL LIKE pattern on the error; a text without % may stand anywhere
        in it. Raises ValueError without either.
        """
        from celery_claim.claims.recover import retry_failed

        if keys is None and error_like is None:
            raise ValueError('retry_failed: say which rows: keys=[...], keys="all" or error_like="%..."')
        if error_like is not None:
            self._require("error_message", "retry_failed(error_like=...)")
            error_like = error_like if "%" in error_like else f"%{error_like}%"
        chosen = None if keys is None or keys == "all" else self._keys(keys)
        with self.claims.linked() as link:
            return retry_failed(link, self.claims.statements, keys=chosen, like=error_like)

    def cancel(self, keys: Sequence[Any]) -> list[Any]:
        """Take rows that nobody has started out of the queue; returns the keys changed."""
        from celery_claim.claims.recover import cancel

        if not self.claims.table.knows(Status.CANCELLED):
            raise ValueError(f"{self.name}: values= has no CANCELLED, so no row can be cancelled")
        with self.claims.linked() as link:
            return cancel(link, self.claims.statements, self._keys(keys))

    def status(self) -> dict[str, int | None]:
        """Rows by state, counted up to 1,000,000 each, and the age in seconds of the oldest pending row.

        The age is None when nothing is pending or the table has no `created_time` column.
        """
        from celery_claim.claims.count import count

        with self.claims.linked() as link:
            return count(link, self.claims.statements)

    def stuck(self) -> int:
        """How many rows are in progress under a lease that never ends (lease_seconds=None): nobody recovers them."""
        from celery_claim.claims.count import count_stuck

        with self.claims.linked() as link:
            return count_stuck(link, self.claims.statements)

    def failures(self, limit: int = 50) -> list[tuple[Any, str | None]]:
        """Keys of failed rows with their errors, by key."""
        from celery_claim.claims.count import failures

        with self.claims.linked() as link:
            return failures(link, self.claims.statements, limit)

    def wake(self) -> bool:
        """Open every enabled window of this task now, for a producer that has committed new rows; whether one opened.

        At most once per min_interval of a window, and not while its consumers are at work. Raises LookupError when the
        task has no window, DatabaseUnavailable.
        """
        from celery_claim.dispatch import Dispatcher

        return Dispatcher.of(self.app).wake(str(self.name))

    def check(self) -> list[Finding]:
        """What is wrong with the table, its indexes and this task's options; empty when all is well."""
        from celery_claim.checking import check_task

        return check_task(self)

    # ---- what the class knows of itself

    @classmethod
    def check_together(cls) -> None:
        """Refuse options that work alone and not together. Raises ConfigurationError."""
        if cls.transactional and cls.handles_batches():
            raise ConfigurationError(
                f"{where(cls)}: transactional=True is per row, it cannot be used with process_batch"
            )
        if cls.transactional and cls.write_back == "batch":
            raise ConfigurationError(
                f"{where(cls)}: transactional=True writes each row back in its own transaction; write_back='batch' "
                "cannot be used with it"
            )

    @classmethod
    def handles_batches(cls) -> bool:
        """Whether the handler takes a list of rows."""
        return cls.process_batch is not ClaimTask.process_batch

    @classmethod
    def handler_and_arguments(cls) -> tuple[Any, tuple[str, ...]]:
        """The user's function as it will be called, and the names of what it gets."""
        own = ("self",)
        if cls.handles_batches():
            return cls.process_batch, (*own, "rows")
        row = ("row", "session") if cls.transactional else ("row",)
        if cls.run is not ClaimTask.run:
            static = isinstance(next(c.__dict__["run"] for c in cls.__mro__ if "run" in c.__dict__), staticmethod)
            return cls.run, row if static else own + row
        return (None, ()) if cls.process is ClaimTask.process else (cls.process, own + row)

    @property
    def claims(self) -> Claims:
        """The table of this task on its database, ready to be claimed from.

        Raises ConfigurationError when there is no database or the table does not fit, DatabaseUnavailable when a
        table without a model cannot be read just now.
        """
        state = state_of(self.app)
        return state.once(("claims", type(self)), self._make_claims)

    # ---- the run

    def _work(self, claim: Mapping[str, Any]) -> dict[str, Any]:
        """One drain in a worker. A table that cannot be worked on is logged now and then, and is the task's result."""
        from celery_claim.exceptions import ClaimError
        from celery_claim.rows.consume import Place

        outage, seconds = self._outage(), claim.get("max_run_time")
        number = claim.get("consumer_id", 0)
        consumer = self._consumer(
            in_worker=True,
            deadline=math.inf if seconds is None else time.monotonic() + seconds,
            place=Place(number, claim.get("ordinal", number), claim.get("consumers", 1)),
        )
        try:
            counts = self._consume(consumer)
        except ClaimError as error:
            outage.failed(error)
            return {"error": str(error)}
        outage.worked()
        return {**asdict(counts), "error": None}

    def _drain(self, *, deadline: float = math.inf, limit: int | None = None, in_worker: bool) -> Counts:
        return self._consume(self._consumer(deadline=deadline, limit=limit, in_worker=in_worker))

    def _consumer(
        self,
        *,
        deadline: float = math.inf,
        limit: int | None = None,
        in_worker: bool,
        place: Place | None = None,
        should_stop: Callable[[], bool] | None = None,
        observer: Observer | None = None,
    ) -> Consumer:
        from celery_claim.rows.consume import Consumer

        claims = self.claims
        consumer_id = place.consumer_id if place else 0
        return Consumer(
            claims.database,
            claims.statements,
            self._options(in_worker=in_worker),
            self._handler(),
            observer or RowSignals(self),
            worker_id=f"{self._node()}-c{consumer_id}",
            place=place,
            pace=self._pace(),
            deadline=deadline,
            limit=limit,
            should_stop=should_stop or worker_is_stopping,
        )

    def _consume(self, consumer: Consumer) -> Counts:
        """Let a consumer do its run, as the window that handlers see."""
        with self._opened(consumer):
            counts = consumer.run()
        if consumer.broken:
            logger.warning("%s: too many of the last rows failed unexpectedly, this run ended early", self.name)
        signals.run_finished.send(sender=self, counts=counts)
        return counts

    def _handler(self) -> Callable[..., Any]:
        return self.process_batch if self.handles_batches() else self.run

    def _options(self, *, in_worker: bool) -> Options:
        from celery_claim.rows.consume import Options
        from celery_claim.rows.process import RetryPolicy

        retry = RetryPolicy(
            max_retries=sys.maxsize if self.max_retries is None else self.max_retries,
            retry_backoff=self.retry_backoff,
            retry_backoff_max=self.retry_backoff_max,
            retry_jitter=self.retry_jitter,
            no_retry_for=tuple(self.no_retry_for),
        )
        return Options(
            batch_size=self.batch_size,
            lease_seconds=self.lease_seconds,
            row_time_limit=self.row_time_limit,
            counts_interruptions=in_worker,
            max_reclaims=self.max_reclaims,
            retry=retry,
            in_batches=self.handles_batches(),
            write_back_in_batches=self.write_back == "batch",
            transactional=self.transactional,
            skip_locked=self.skip_locked,
            failure_breaker=self.failure_breaker if in_worker else None,
        )

    def _make_claims(self) -> Claims:
        from celery_claim.claims.table import Claims

        return Claims.of(
            self.database,
            model=self.model,
            table=self.table,
            schema=self.schema,
            columns=self.columns,
            values=self.values,
        )

    def _pace(self) -> Pace:
        from celery_claim.rows.consume import Pace

        return state_of(self.app).once(("pace", type(self)), Pace)

    def _keys(self, keys: Sequence[Any]) -> list[Any]:
        if isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence):
            raise TypeError(f"expected a list of keys, got {keys!r}")
        if any(isinstance(key, (float, bool)) for key in keys):
            # A database rounds a fraction, each in its own way, and then another row is meant.
            raise TypeError(f"keys are never fractions or truth values: {list(keys)!r}")
        return list(keys)

    def _require(self, role: str, what: str) -> None:
        if not self.claims.table.has(role):
            raise ValueError(
                f"{self.name}: {what} needs a column for {role}, and table {self.claims.table.name} has none"
            )
