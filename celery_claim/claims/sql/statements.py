"""Every statement that claims run, each under a name; tests keep their rendered text for each database.

Rows are reached by primary key only (MySQL is told to), in the order of the key, so that no two statements ever lock
the same rows by different routes. Values of the status column are written into the text, not bound: PostgreSQL can
prove that a partial index covers `status = 0`, not `status = $1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Select,
    SmallInteger,
    String,
    Update,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal,
    literal_column,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.orm import undefer

from celery_claim.claims.sql.columns import ClaimTable
from celery_claim.dialects import Dialect, epoch_seconds
from celery_claim.states import Status

S = TypeVar("S", Select[Any], Update)

#: Counters stop here instead of making a write fail that carries a result.
COUNTER_LIMIT = 32767
TINY_COUNTER_LIMIT = 127


class Statements:
    """The statements for one table on one database, built once."""

    def __init__(self, table: ClaimTable, dialect: Dialect, *, for_one: bool = False) -> None:
        """With `for_one`, the parameter `keys` of every statement is one key instead of a list."""
        self.of = table
        self.dialect = dialect
        self._for_one = for_one

    @cached_property
    def for_one(self) -> Statements:
        """The same statements for one key: their text never changes, so nothing has to be rendered to run them."""
        return Statements(self.of, self.dialect, for_one=True)

    def keeps(self, statement: Any) -> bool:
        """Whether a statement is one of those made once, which a database may keep compiled."""
        return any(statement is kept for kept in tuple(vars(self).values()))

    # ---- claim

    @cached_property
    def candidates(self) -> Select[Any]:
        """Keys of claimable rows in their order, from the (status, key) index. Locks nothing."""
        return (
            select(self.of.key)
            .where(*self._claimable)
            .order_by(self.of.key)
            .limit(bindparam("limit", type_=Integer))
            .offset(bindparam("offset", type_=Integer))
        )

    @cached_property
    def claim(self) -> Update:
        """Take those of the candidates that nobody took before; the status guard decides the race."""
        return self._update(self._ownership(), self._keyed, *self._claimable)

    @cached_property
    def claim_pending(self) -> Update:
        """Candidates and claim in one statement, where the database can do that without a race."""
        page = select(self.of.key).where(*self._claimable).order_by(self.of.key)
        page = self.dialect.passing_locked(page.limit(bindparam("limit", type_=Integer)))
        if self.dialect.skips_locked:
            # An array is evaluated once. As a plain subquery the planner may evaluate it again for each row and
            # so claim more rows than the limit.
            chosen = self.of.key == func.any(func.array(page.scalar_subquery()))
        else:
            chosen = self.of.key.in_(page.scalar_subquery())
        return self._update(self._ownership(), chosen, *self._claimable)

    @cached_property
    def locked_candidates(self) -> Select[Any]:
        """Candidates that are locked until the claim commits, passing over those of others (an option on MySQL 8)."""
        statement = select(self.of.key).where(*self._claimable).order_by(self.of.key)
        return statement.limit(bindparam("limit", type_=Integer)).with_for_update(skip_locked=True)

    @cached_property
    def won(self) -> Select[Any]:
        """The rows that carry our token, whole: objects of the model or rows of the table."""
        rows: Select[Any]
        if self.of.entity is not None:
            rows = select(self.of.entity).options(undefer("*"))
        else:
            rows = select(self.of.table)
        return self._by_key(rows.where(self._keyed, self._owned).order_by(self.of.key))

    @cached_property
    def retries(self) -> Select[Any]:
        """The retry counter alone, of a row that cannot be read whole."""
        return self._by_key(select(self.of.columns["retry_count"]).where(self._keyed))

    @cached_property
    def won_keys(self) -> Select[Any]:
        """Keys of the rows among those given that are still ours."""
        return self._by_key(select(self.of.key).where(self._keyed, self._owned).order_by(self.of.key))

    @cached_property
    def keys_of_token(self) -> Select[Any]:
        """Keys of a claim whose answer was lost before its keys were known, found among the rows in progress."""
        return select(self.of.key).where(self._owned).order_by(self.of.key)

    # ---- keep, hand back

    @cached_property
    def renew(self) -> Update:
        """Start the lease of our rows anew."""
        return self._update([("claim_time", epoch_seconds())], self._keyed, self._owned)

    @cached_property
    def release(self) -> Update:
        """Give our rows back, as if they had never been claimed."""
        return self._update(self._nobody, self._keyed, self._owned)

    @cached_property
    def release_counted(self) -> Update:
        """Give back a row that asked for a retry in a table where a retry cannot wait."""
        return self._update([*self._nobody, *self._one_more_retry], self._keyed, self._owned)

    def release_blamed(self, *, bounded: bool) -> Update:
        """Give a row of ours back as recover does: its handler ended the process, or was ended by a time limit."""
        return self._update(self._reclaimed(bounded), self._keyed, self._owned)

    @cached_property
    def release_any(self) -> Update:
        """Give rows back whoever owns them; the owner's result will be refused."""
        return self._update(self._nobody, self._keyed, self._is(Status.PROCESSING))

    # ---- write back

    @cached_property
    def succeed(self) -> Update:
        """Mark our rows as succeeded."""
        return self.succeed_with(())

    def succeed_with(self, names: Sequence[str]) -> Update:
        """Mark our row as succeeded; the columns `names` get the values bound as value_0, value_1 ..."""
        assignments: list[Any] = [("status", self._value(Status.SUCCEEDED)), ("error_message", null())]
        assignments += [(c, bindparam(f"value_{i}", type_=c.type)) for i, c in enumerate(self._named(names))]
        return self._update(assignments, self._keyed, self._owned)

    def succeed_each(self, names: Sequence[str], count: int) -> Update:
        """Mark `count` rows as succeeded in one statement, each with the values bound for its key."""
        assignments: list[Any] = [("status", self._value(Status.SUCCEEDED)), ("error_message", null())]
        for i, column in enumerate(self._named(names)):
            whens = [
                (
                    self.of.key == bindparam(f"key_{number}", type_=self.of.key.type),
                    bindparam(f"value_{i}_{number}", type_=column.type),
                )
                for number in range(count)
            ]
            assignments.append((column, case(*whens)))
        return self._update(assignments, self._keyed, self._owned)

    @cached_property
    def fail(self) -> Update:
        """Mark our rows as failed, for good."""
        assignments = [("status", self._value(Status.FAILED)), ("error_message", bindparam("error", type_=String()))]
        return self._update(assignments, self._keyed, self._owned)

    @cached_property
    def retry(self) -> Update:
        """Put our row aside until it is due."""
        target = Status.PENDING if self.of.waits_as_pending else Status.RETRYING
        return self._update(
            [
                ("status", self._value(target)),
                ("next_retry_time", epoch_seconds() + bindparam("seconds", type_=BigInteger)),
                ("error_message", bindparam("error", type_=String())),
                *self._one_more_retry,
            ],
            self._keyed,
            self._owned,
        )

    @cached_property
    def written(self) -> Select[Any]:
        """Keys of our rows that are no longer in progress: a write back whose answer was lost did reach them.

        Holds because a write back keeps the token, and whatever else ends a claim removes or replaces it.
        """
        status, token = self.of.status, self.of.columns["claim_token"]
        guard = (self._keyed, status != self._value(Status.PROCESSING), token == bindparam("token", type_=token.type))
        return self._by_key(select(self.of.key).where(*guard).order_by(self.of.key))

    # ---- recover, promote, and what an operator does

    def expired(self, *, override: bool, behind: bool = False) -> Select[Any]:
        """A page of keys whose lease is over; `override` judges by the given lease instead of the row's own."""
        return self._page(*self._expired(override), behind=behind)

    def recover(self, *, override: bool, bounded: bool) -> Update:
        """Give expired rows back; with `bounded`, a row that outlived too many owners fails instead."""
        return self._update(self._reclaimed(bounded), self._keyed, *self._expired(override))

    def dateless(self, *, behind: bool = False) -> Select[Any]:
        """A page of rows in progress without a claim time: edited by hand, or claimed before the column was there."""
        guard = (self._is(Status.PROCESSING), self.of.columns["claim_time"].is_(None), *self._only)
        return self._page(*guard, behind=behind)

    @cached_property
    def date(self) -> Update:
        """Start a lease for rows that have none; they are recovered when it ends like any other."""
        guard = (self._is(Status.PROCESSING), self.of.columns["claim_time"].is_(None))
        return self._update([("claim_time", epoch_seconds())], self._keyed, *guard)

    @cached_property
    def due(self) -> Select[Any]:
        """A page of retries that are due, the longest due first."""
        due = self.of.columns["next_retry_time"]
        statement = select(self.of.key).where(self._is(Status.RETRYING), self._is_due, *self._only)
        return statement.order_by(due, self.of.key).limit(bindparam("limit", type_=Integer))

    @cached_property
    def promote(self) -> Update:
        """Make due retries claimable; one that was run and put aside again meanwhile is not due any more."""
        guard = (self._is(Status.RETRYING), self._is_due)
        return self._update([("status", self._value(Status.PENDING))], self._keyed, *guard)

    def failed(self, *, like: bool, behind: bool = False) -> Select[Any]:
        """A page of failed rows, all or those whose error matches."""
        return self._page(*self._failed(like), behind=behind)

    def retry_failed(self, *, like: bool) -> Update:
        """Make failed rows claimable with fresh counters; the error stays until the row ends again."""
        counters = [(role, literal(0, SmallInteger, literal_execute=True)) for role in ("retry_count", "reclaim_count")]
        assignments = [("status", self._value(Status.PENDING)), *counters, ("next_retry_time", null())]
        return self._update(assignments, self._keyed, *self._failed(like))

    @cached_property
    def cancel(self) -> Update:
        """Take rows that nobody has started out of the queue."""
        return self._update([("status", self._value(Status.CANCELLED))], self._keyed, self._cancellable)

    def in_state(self, *states: Status) -> Select[Any]:
        """Keys, among those given, of rows in one of the states."""
        guard = self.of.status.in_([self._value(state) for state in states if self.of.knows(state)])
        return self._by_key(select(self.of.key).where(self._keyed, guard).order_by(self.of.key))

    # ---- look

    def count(self, status: Status) -> Select[Any]:
        """How many rows are in a state, counted up to a bound: an exact count of a large table is a load of its own."""
        page = select(literal(1, Integer, literal_execute=True).label("one")).where(self._is(status), *self._only)
        return select(func.count()).select_from(page.limit(bindparam("limit", type_=Integer)).subquery())

    @cached_property
    def oldest_pending(self) -> Select[Any]:
        """Seconds since the first pending row was created."""
        age = epoch_seconds() - self.of.columns["created_time"]
        return select(age).where(*self._claimable).order_by(self.of.key).limit(1)

    @cached_property
    def stuck(self) -> Select[Any]:
        """How many rows in progress are under a lease that never ends."""
        lease = self.of.columns["lease_seconds"]
        endless = lease == literal(ENDLESS_SECONDS, Integer, literal_execute=True)
        page = select(literal(1, Integer, literal_execute=True).label("one")).where(
            self._is(Status.PROCESSING), endless, *self._only
        )
        return select(func.count()).select_from(page.limit(bindparam("limit", type_=Integer)).subquery())

    @cached_property
    def failures(self) -> Select[Any]:
        """Failed rows with their errors."""
        error = self.of.column("error_message")
        statement = (
            select(self.of.key, null() if error is None else error)
            .where(*self._failed(like=False))
            .order_by(self.of.key)
        )
        return statement.limit(bindparam("limit", type_=Integer))

    def named(self) -> Mapping[str, Any]:
        """The statements that a consumer and the maintenance run on this table, by name, for people to read."""
        one = (
            {"claim": self.claim_pending}
            if self.dialect.claims_in_one_statement
            else {
                "candidates": self.candidates,
                "claim": self.claim,
            }
        )
        statements: dict[str, Any] = {
            **one,
            "won": self.won,
            "renew": self.renew,
            "release": self.release,
            "succeed": self.succeed,
            "fail": self.fail,
            "expired": self.expired(override=False),
            "recover": self.recover(override=False, bounded=self.of.has("reclaim_count")),
        }
        if self.of.delays:
            statements["retry"] = self.retry
            if not self.of.waits_as_pending:
                statements |= {"due": self.due, "promote": self.promote}
        return statements

    # ---- the parts

    @property
    def _only(self) -> tuple[ColumnElement[bool], ...]:
        return () if self.of.only is None else (self.of.only,)

    @property
    def _keyed(self) -> ColumnElement[bool]:
        if self._for_one:
            one: ColumnElement[bool] = self.of.key == bindparam("keys", type_=self.of.key.type)
            return one
        return self.dialect.among(self.of.key, "keys")

    @property
    def _claimable(self) -> tuple[ColumnElement[bool], ...]:
        delayed = (self._is_due,) if self.of.waits_as_pending else ()
        return (self._is(Status.PENDING), *delayed, *self._only)

    @property
    def _is_due(self) -> ColumnElement[bool]:
        due = self.of.columns["next_retry_time"]
        return or_(due.is_(None), due <= epoch_seconds())

    @property
    def _owned(self) -> ColumnElement[bool]:
        token = self.of.columns["claim_token"]
        # Match on the claim token, not the status alone: after a recovery the row is in progress again, and a late
        # worker would overwrite the new owner's result.
        return and_(self._is(Status.PROCESSING), token == bindparam("token", type_=token.type))

    @property
    def _cancellable(self) -> ColumnElement[bool]:
        states = [state for state in (Status.PENDING, Status.QUEUED, Status.RETRYING) if self.of.knows(state)]
        return self.of.status.in_([self._value(state) for state in states])

    def _expired(self, override: bool) -> tuple[ColumnElement[bool], ...]:
        since: Any = self.of.columns["claim_time"]
        if not isinstance(since.type, BigInteger):
            since = cast(since, BigInteger)
        lease: Any = bindparam("lease", type_=Integer)
        own = self.of.column("lease_seconds")
        if own is not None and not override:
            lease = func.coalesce(own, lease)
        # The sum, not a difference: MySQL's clock is unsigned, and an endless lease would make it negative.
        return (self._is(Status.PROCESSING), since + lease < epoch_seconds(), *self._only)

    def _failed(self, like: bool) -> tuple[ColumnElement[bool], ...]:
        matches = (self.of.columns["error_message"].like(bindparam("like", type_=String())),) if like else ()
        return (self._is(Status.FAILED), *matches, *self._only)

    def _page(self, *guard: ColumnElement[bool], behind: bool) -> Select[Any]:
        """The first keys, or those behind `after`: a page of rows that may not be touched must not hide the rest."""
        page = select(self.of.key).where(*guard).order_by(self.of.key).limit(bindparam("limit", type_=Integer))
        return page.where(self.of.key > bindparam("after", type_=self.of.key.type)) if behind else page

    def _ownership(self) -> list[tuple[str, Any]]:
        token = self.of.columns["claim_token"]
        return [
            ("status", self._value(Status.PROCESSING)),
            ("claim_token", bindparam("token", type_=token.type)),
            ("claim_time", epoch_seconds()),
            ("lease_seconds", bindparam("lease", type_=Integer)),
            ("worker_id", bindparam("worker", type_=String())),
        ]

    @property
    def _nobody(self) -> list[tuple[str, Any]]:
        cleared = [(role, null()) for role in ("claim_token", "claim_time", "lease_seconds", "worker_id")]
        return [("status", self._value(Status.PENDING)), *cleared]

    def _reclaimed(self, bounded: bool) -> list[Any]:
        """What becomes of a row that lost its owner; with `bounded` it fails when it has lost too many."""
        status: Any = self._value(Status.PENDING)
        assignments: list[Any] = []
        counter = self.of.column("reclaim_count")
        if counter is not None:
            if bounded:
                # Written with the old counter in mind: MySQL assigns from left to right, and a CASE that stood
                # behind the counter's own assignment would already see the new one.
                too_often = counter >= bindparam("max_reclaims", type_=Integer)
                status = case((too_often, self._value(Status.FAILED)), else_=status)
                error = self.of.column("error_message")
                if error is not None:
                    assignments.append((error, case((too_often, bindparam("error", type_=String())), else_=error)))
            assignments.append((counter, self._incremented(counter)))
        cleared = [(role, null()) for role in ("claim_token", "claim_time", "lease_seconds", "worker_id")]
        return [("status", status), *assignments, *cleared]

    @property
    def _one_more_retry(self) -> list[tuple[str, Any]]:
        counter = self.of.column("retry_count")
        return [] if counter is None else [("retry_count", self._incremented(counter))]

    def _incremented(self, counter: Any) -> ColumnElement[int]:
        limit = TINY_COUNTER_LIMIT if "TINY" in type(counter.type).__name__ else COUNTER_LIMIT
        return case((counter < limit, counter + 1), else_=counter)

    def _named(self, names: Sequence[str]) -> list[Any]:
        return [self.of.writable[name] for name in names]

    def _value(self, status: Status) -> Any:
        value = self.of.values[status]
        if type(value) is int:
            return literal_column(str(value), self.of.status.type)
        return literal(value, self.of.status.type, literal_execute=True)

    def _is(self, status: Status) -> ColumnElement[bool]:
        equal: ColumnElement[bool] = self.of.status == self._value(status)
        return equal

    def _by_key(self, statement: S) -> S:
        bound: S = self.dialect.by_primary_key(statement, self.of.table)
        return bound

    def _update(self, assignments: Sequence[tuple[Any, Any]], *guard: ColumnElement[bool]) -> Update:
        """An UPDATE by key that assigns, in this order, to the columns this table has."""
        pairs = [
            (target if not isinstance(target, str) else self.of.columns[target], value)
            for target, value in assignments
            if not isinstance(target, str) or self.of.has(target)
        ]
        statement = self._by_key(update(self.of.table).ordered_values(*pairs).where(*guard))
        return statement.returning(self.of.key) if self.dialect.claims_in_one_statement else statement


#: What `lease_seconds=None` writes: the largest INT.
ENDLESS_SECONDS = 2147483647
