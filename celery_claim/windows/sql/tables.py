"""The tables of windows, their runs, and ordinary beat entries.

Times are milliseconds since 1970 by the database's clock, and so are lengths of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Index, Integer, MetaData, String, Table, Text

from celery_claim.nodes.sql.tables import NAME_LENGTH, OPTIONS, NodeTables


@dataclass(frozen=True)
class WindowTables:
    """The tables of one prefix and schema."""

    window: Table
    run: Table
    entry: Table
    nodes: NodeTables

    @classmethod
    def of(cls, prefix: str, schema: str | None) -> WindowTables:
        metadata = MetaData()
        nodes = NodeTables.of(prefix, schema, metadata)
        window, run, entry = (make(prefix, schema, metadata) for make in (_window, _run, _entry))
        return cls(window, run, entry, nodes)

    def __iter__(self) -> Iterator[Table]:
        return iter((*self.nodes, self.window, self.run, self.entry))


def _window(prefix: str, schema: str | None, metadata: MetaData) -> Table:
    return Table(
        f"{prefix}window",
        metadata,
        Column("name", String(NAME_LENGTH), primary_key=True),
        # As declared in code; written by whoever fires, whenever it differs.
        Column("task", String(255), nullable=False),
        Column("frequency", BigInteger, nullable=False),
        Column("max_run_time", BigInteger, nullable=False),
        Column("concurrency", Integer, nullable=False),
        Column("max_concurrency", Integer),
        Column("run_type", String(10), nullable=False),
        Column("enabled", Boolean(create_constraint=False), nullable=False),
        Column("continuous", Boolean(create_constraint=False), nullable=False),
        Column("min_interval", BigInteger),
        #: args, kwargs and queue of the messages, as JSON.
        Column("message", Text, nullable=False),
        # Changed at run time; null: as declared. A deploy never overwrites them.
        Column("frequency_override", BigInteger),
        Column("max_run_time_override", BigInteger),
        Column("concurrency_override", Integer),
        Column("enabled_override", Boolean(create_constraint=False)),
        # What happened last.
        Column("last_slot_start", BigInteger, nullable=False, default=0, server_default="0"),
        Column("active_until", BigInteger),
        Column("fire_seq", BigInteger, nullable=False, default=0, server_default="0"),
        Column("triggered_by", String(NAME_LENGTH)),
        Column("triggered_at", BigInteger),
        schema=schema,
        **OPTIONS,
    )


def _run(prefix: str, schema: str | None, metadata: MetaData) -> Table:
    # SQLite counts up by itself only for a key of the type INTEGER.
    number: Any = BigInteger().with_variant(Integer, "sqlite")
    run = Table(
        f"{prefix}run",
        metadata,
        Column("id", number, primary_key=True, autoincrement=True),
        Column("window", String(NAME_LENGTH), nullable=False),
        Column("fire_seq", BigInteger, nullable=False),
        Column("slot_start", BigInteger, nullable=False),
        Column("kind", String(10), nullable=False),
        Column("triggered_by", String(NAME_LENGTH)),
        #: Empty: whichever worker is free.
        Column("node", String(NAME_LENGTH), nullable=False, default="", server_default=""),
        #: Null, as the next three, in a row that tells of slots without a run.
        Column("consumer_id", Integer),
        Column("ordinal", Integer),
        #: How many places the fire had, over all nodes.
        Column("consumers", Integer),
        Column("attempt", Integer),
        Column("state", String(10), nullable=False),
        Column("token", String(32)),
        Column("boot_id", String(32)),
        Column("start_before", BigInteger, nullable=False),
        Column("published_at", BigInteger),
        Column("max_run_time", BigInteger, nullable=False),
        Column("stop_at", BigInteger),
        Column("lease_until", BigInteger),
        Column("created_at", BigInteger, nullable=False),
        Column("started_at", BigInteger),
        Column("finished_at", BigInteger),
        *(Column(count, Integer) for count in COUNTS),
        Column("error", Text),
        Column("pid", Integer),
        Column("task_id", String(500)),
        schema=schema,
        **OPTIONS,
    )
    # What maintenance looks for; the live runs of all windows at each fire; a window's history; what is too old.
    Index(f"ix_{prefix}run_state", run.c.state, run.c.created_at)
    Index(f"ix_{prefix}run_fire", run.c.window, run.c.fire_seq)
    Index(f"ix_{prefix}run_created", run.c.created_at)
    return run


#: What a run did with how many rows.
COUNTS = ("claimed", "succeeded", "failed", "retried", "released", "lost")


def _entry(prefix: str, schema: str | None, metadata: MetaData) -> Table:
    return Table(
        f"{prefix}entry",
        metadata,
        Column("name", String(NAME_LENGTH), primary_key=True),
        Column("last_run_at", BigInteger, nullable=False),
        Column("total_run_count", BigInteger, nullable=False, default=0, server_default="0"),
        #: A changed schedule starts anew, as a new entry does.
        Column("schedule", Text, nullable=False),
        schema=schema,
        **OPTIONS,
    )
