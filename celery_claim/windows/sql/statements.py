"""Every statement that windows run, each under a name; tests keep their rendered text for each database.

Whoever inserts runs locks the row of their window first and touches runs second: two that meet wait, and never for
each other. A single statement on one run, by its key, may come at any time.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Delete,
    Insert,
    Integer,
    Select,
    String,
    Update,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    null,
    or_,
    select,
    true,
    update,
)

from celery_claim.dialects import Dialect, epoch_milliseconds
from celery_claim.nodes.leases import MAIN_LEASE
from celery_claim.windows.sql.tables import COUNTS, WindowTables

#: States of a run that is over, whatever became of it.
ENDED = ("done", "empty", "timeout", "error", "skipped", "missed", "lost")


def _value(name: str, kind: Any = BigInteger) -> Any:
    return bindparam(name, type_=kind())


class WindowStatements:
    """The statements for one set of tables, built once."""

    def __init__(self, tables: WindowTables, dialect: Dialect) -> None:
        self._window, self._run, self._node = tables.window, tables.run, tables.nodes.node
        self._lease = tables.nodes.lease
        self.tables = tables
        self.dialect = dialect
        self._now = epoch_milliseconds()

    # ---- look

    @cached_property
    def look(self) -> Select[Any]:
        """All windows, and the database's clock. Locks nothing."""
        return select(self._window, self._now.label("now")).order_by(self._window.c.name)

    @cached_property
    def clock(self) -> Select[Any]:
        return select(self._now)

    # ---- register

    @cached_property
    def add_window(self) -> Insert:
        return insert(self._window)

    @cached_property
    def lock_window(self) -> Select[Any]:
        """One window, locked until the end of the transaction, and the database's clock."""
        statement = select(self._window, self._now.label("now")).where(self._window.c.name == _value("name", String))
        return statement.with_for_update()

    def change_window(self, **values: Any) -> Update:
        """New values for a window that is locked."""
        return update(self._window).values(**values).where(self._window.c.name == _value("window_name", String))

    @cached_property
    def forget_window(self) -> Delete:
        return delete(self._window).where(self._window.c.name == _value("name", String))

    # ---- fire

    @cached_property
    def lock_windows(self) -> Select[Any]:
        """The windows among those given, locked until the end of the transaction, in the order of their names."""
        statement = select(self._window, self._now.label("now")).where(self._window.c.name.in_(self._names))
        return statement.order_by(self._window.c.name).with_for_update()

    @cached_property
    def field(self) -> Any:
        """Where runs can go and where they are: every node that lives, every live run, who is main, the
        clock: in one answer."""
        nodes = select(
            literal("node").label("what"),
            self._node.c.node.label("node"),
            self._node.c.queues.label("text"),
            self._node.c.running.label("number"),
            self._node.c.role.label("role"),
            self._node.c.pool_size.label("size"),
        ).where(self._node_lives, self._node.c.accepting == true())
        runs = select(
            literal("run"),
            self._run.c.node,
            self._run.c.window,
            self._run.c.consumer_id,
            null(),
            null(),
        ).where(self.live)
        leases = select(
            literal("lease"),
            self._lease.c.owner,
            self._lease.c.name,
            null(),
            null(),
            null(),
        ).where(self._lease.c.name == MAIN_LEASE, self._lease.c.expires_at > self._now)
        clock = select(literal("clock"), null(), null(), self._now, null(), null())
        return nodes.union_all(runs, leases, clock)

    @cached_property
    def mark_fired(self) -> Update:
        """The windows that fire now: a new slot, a new number, and until when they are occupied.

        Frequency and length are read where they stand; `now` is what the server said when it locked the rows.
        """
        frequency = func.coalesce(self._window.c.frequency_override, self._window.c.frequency)
        length = func.coalesce(self._window.c.max_run_time_override, self._window.c.max_run_time)
        now = _value("at")
        return (
            update(self._window)
            .values(
                last_slot_start=now - now % frequency,
                fire_seq=self._window.c.fire_seq + 1,
                active_until=now + length,
            )
            .where(self._window.c.name.in_(self._names))
        )

    @cached_property
    def mark_unmanned(self) -> Update:
        """The windows whose slot passes without runs: nobody is there, or every consumer is at work."""
        frequency = func.coalesce(self._window.c.frequency_override, self._window.c.frequency)
        now = _value("at")
        return (
            update(self._window)
            .values(last_slot_start=now - now % frequency, fire_seq=self._window.c.fire_seq + 1)
            .where(self._window.c.name.in_(self._names))
        )

    @cached_property
    def mark_triggered(self) -> Update:
        """A window opened by hand: the grid stays as it is."""
        length = func.coalesce(self._window.c.max_run_time_override, self._window.c.max_run_time)
        return (
            update(self._window)
            .values(
                fire_seq=self._window.c.fire_seq + 1,
                active_until=_value("at") + length,
                triggered_at=_value("at"),
                triggered_by=_value("by", String),
            )
            .where(self._window.c.name == _value("window_name", String))
        )

    @cached_property
    def add_runs(self) -> Insert:
        return insert(self._run)

    @cached_property
    def mark_published(self) -> Update:
        """The runs of some fires whose messages are out."""
        return (
            update(self._run)
            .values(published_at=self._now)
            .where(
                self._run.c.task_id.in_(bindparam("task_ids", expanding=True, type_=String())),
                self._run.c.window.in_(self._names),
                self._run.c.fire_seq.in_(bindparam("fires", expanding=True, type_=BigInteger())),
                self._run.c.published_at.is_(null()),
            )
        )

    @cached_property
    def attempts(self) -> Select[Any]:
        """The highest attempt of each place of one fire."""
        run = self._run.c
        return (
            select(run.node, run.consumer_id, func.max(run.attempt).label("attempt"))
            .where(run.window == _value("window", String), run.fire_seq == _value("fire_seq"))
            .group_by(run.node, run.consumer_id)
        )

    # ---- run

    @cached_property
    def start(self) -> Update:
        """Take a run that is waiting. A second delivery finds another state, a moved run another attempt, a late
        message that its time is over."""
        return (
            update(self._run)
            .values(
                state="running",
                node=_value("by_node", String),
                boot_id=_value("boot", String),
                token=_value("by_token", String),
                pid=_value("by_pid", Integer),
                started_at=self._now,
                stop_at=self._now + self._run.c.max_run_time,
                lease_until=self._now + _value("timeout"),
            )
            .where(*self._this_message, self._run.c.start_before >= self._now)
        )

    @cached_property
    def miss(self) -> Update:
        """A run whose message came too late."""
        return (
            update(self._run)
            .values(state="missed", finished_at=self._now, error="its message came when its time was over")
            .where(*self._this_message, self._run.c.start_before < self._now)
        )

    @cached_property
    def started(self) -> Select[Any]:
        """The run that our token started, and how long it may start rows."""
        run = self._run.c
        return select(
            run.id, (run.stop_at - self._now).label("left"), run.slot_start, run.ordinal, run.consumers
        ).where(*self._this_place, run.token == _value("by_token", String))

    @cached_property
    def renew(self) -> Update:
        """Stay the owner of a running run. A lease that is over stays so: the consumer id may be another's by now."""
        return update(self._run).values(lease_until=self._now + _value("timeout")).where(*self._ours, self._leased)

    @cached_property
    def still_ours(self) -> Select[Any]:
        return select(self._run.c.id).where(*self._ours, self._leased)

    @cached_property
    def bounds(self) -> Select[Any]:
        """What may end a running run before its time: a pause, or a lower concurrency."""
        return select(self._window).where(self._window.c.name == _value("name", String))

    @cached_property
    def end(self) -> Update:
        """What became of our run."""
        return (
            update(self._run)
            .values(
                state=_value("ended", String),
                finished_at=self._now,
                lease_until=null(),
                error=_value("text", String),
                **{count: _value(f"n_{count}", Integer) for count in COUNTS},
            )
            .where(*self._ours)
        )

    @cached_property
    def drop_own(self) -> Delete:
        """Our run, where empty ones are not kept."""
        return delete(self._run).where(*self._ours)

    @cached_property
    def ended_as(self) -> Select[Any]:
        run = self._run.c
        return select(run.state).where(run.id == _value("run_id"), run.token == _value("by_token", String))

    @cached_property
    def free_window(self) -> Update:
        """Clear active_until when no run of the fire that set it is live any more."""
        return (
            update(self._window)
            .values(active_until=null())
            .where(
                self._window.c.name == _value("window_name", String),
                self._window.c.fire_seq == _value("fire"),
                ~exists().where(
                    self._run.c.window == _value("window_name", String),
                    self._run.c.fire_seq == _value("fire"),
                    self.live,
                ),
            )
        )

    # ---- history

    def history(self, limit: int, *, since_ms: int | None = None, **wanted: Any) -> Select[Any]:
        """Runs, newest first; `wanted`: column -> its value, or a list of them; None: any."""
        run = self._run.c
        query = select(self._run).order_by(run.id.desc()).limit(limit)
        for name, value in wanted.items():
            if value is not None:
                column = run[name]
                query = query.where(column == value if isinstance(value, (str, int)) else column.in_(value))
        return query if since_ms is None else query.where(run.created_at >= self._now - since_ms)

    # ---- maintain

    @cached_property
    def lose_earlier_starts(self) -> Update:
        """Runs that a dead worker of this name left running."""
        run = self._run.c
        return (
            update(self._run)
            .values(state="lost", finished_at=self._now, error="its worker was started again")
            .where(run.state == "running", run.node == _value("at_node", String), run.boot_id != _value("boot", String))
        )

    @cached_property
    def dead_runs(self) -> Select[Any]:
        """Runs whose consumer is gone: nobody renews them, or their worker was started again under its name."""
        run = self._run.c
        page = select(run.id, run.window, run.fire_seq, run.consumer_id, run.node)
        return page.where(*self._abandoned).order_by(run.id)

    @cached_property
    def lose(self) -> Update:
        return (
            update(self._run)
            .values(state="lost", finished_at=self._now, error="its consumer was killed, frozen or cut off")
            .where(self._run.c.id == _value("run_id"), *self._abandoned)
        )

    @cached_property
    def miss_overdue(self) -> Update:
        """Runs that nobody started in time."""
        run = self._run.c
        return (
            update(self._run)
            .values(state="missed", finished_at=self._now, error="no worker started it in time")
            .where(run.state == "pending", run.start_before < self._now)
        )

    @cached_property
    def waiting(self) -> Select[Any]:
        """Runs that should have been started by now and still can be."""
        run = self._run.c
        return (
            select(self._run, run.published_at.is_(null()).label("unpublished"))
            .where(
                run.state == "pending",
                run.start_before >= self._now,
                func.coalesce(run.published_at, run.created_at) <= self._now - _value("accept_timeout"),
            )
            .order_by(run.id)
            .limit(_value("limit", Integer))
        )

    @cached_property
    def move(self) -> Update:
        """Send an unstarted run to another node; its earlier message will find another attempt."""
        run = self._run.c
        return (
            update(self._run)
            .values(
                node=_value("new_node", String),
                attempt=run.attempt + 1,
                published_at=null(),
                task_id=_value("new_task_id", String),
            )
            .where(run.id == _value("run_id"), run.attempt == _value("number", Integer), run.state == "pending")
        )

    @cached_property
    def ages(self) -> Select[Any]:
        """Smallest and largest number of the history."""
        return select(func.min(self._run.c.id), func.max(self._run.c.id))

    @cached_property
    def too_old(self) -> Select[Any]:
        """A page of ended runs that are older than the history is kept."""
        run = self._run.c
        page = select(run.id).where(run.created_at < self._now - _value("retention"), run.state.in_(ENDED))
        return page.order_by(run.created_at).limit(_value("limit", Integer))

    @cached_property
    def too_many(self) -> Select[Any]:
        """A page of ended runs with numbers below a bound."""
        run = self._run.c
        page = select(run.id).where(run.id < _value("bound"), run.state.in_(ENDED))
        return page.order_by(run.id).limit(_value("limit", Integer))

    @cached_property
    def drop_runs(self) -> Delete:
        return delete(self._run).where(self._run.c.id.in_(bindparam("ids", expanding=True, type_=BigInteger())))

    # ---- conditions

    @property
    def live(self) -> ColumnElement[bool]:
        """A run that has, or will have, an owner; by the clock alone, whatever maintenance has marked."""
        run = self._run.c
        return or_(
            and_(run.state == "pending", run.start_before >= self._now),
            and_(run.state == "running", run.lease_until > self._now),
        )

    @property
    def _node_lives(self) -> ColumnElement[bool]:
        lives: ColumnElement[bool] = self._node.c.heartbeat_at > self._now - _value("node_timeout")
        return lives

    @property
    def _names(self) -> Any:
        return bindparam("names", expanding=True, type_=String())

    @property
    def _this_place(self) -> tuple[ColumnElement[bool], ...]:
        run = self._run.c
        return (
            run.window == _value("of_window", String),
            run.fire_seq == _value("fire"),
            run.consumer_id == _value("consumer", Integer),
            run.attempt == _value("number", Integer),
        )

    @property
    def _this_message(self) -> tuple[ColumnElement[bool], ...]:
        return (*self._this_place, self._run.c.node == _value("to_node", String), self._run.c.state == "pending")

    @property
    def _abandoned(self) -> tuple[ColumnElement[bool], ...]:
        """A running run whose consumer is gone."""
        run, node = self._run.c, self._node.c
        restarted = exists().where(node.node == run.node, node.boot_id != run.boot_id)
        return (run.state == "running", or_(run.lease_until <= self._now, restarted))

    @property
    def _leased(self) -> ColumnElement[bool]:
        leased: ColumnElement[bool] = self._run.c.lease_until > self._now
        return leased

    @property
    def _ours(self) -> tuple[ColumnElement[bool], ...]:
        run = self._run.c
        return (run.id == _value("run_id"), run.token == _value("by_token", String), run.state == "running")
