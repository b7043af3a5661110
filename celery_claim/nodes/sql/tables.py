"""The tables of nodes and leases.

Times are milliseconds since 1970 by the database's clock. Texts that are part of an index have at most 190
characters: MySQL 5.6 indexes 767 bytes, and utf8mb4 takes four for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Integer, MetaData, String, Table, Text

#: Longest name of a node, a window or a lease.
NAME_LENGTH = 190

#: On MySQL: rows that can be locked, every character there is, and names that differ in case stay two names.
OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"), ("collate", "utf8mb4_bin"))
}


@dataclass(frozen=True)
class NodeTables:
    """The tables of one prefix and schema."""

    version: Table
    node: Table
    lease: Table

    @classmethod
    def of(cls, prefix: str, schema: str | None, metadata: MetaData | None = None) -> NodeTables:
        metadata = MetaData() if metadata is None else metadata
        return cls(
            version=Table(
                f"{prefix}version",
                metadata,
                Column("version", Integer, primary_key=True, autoincrement=False),
                Column("created_at", BigInteger, nullable=False),
                schema=schema,
                **OPTIONS,
            ),
            node=Table(
                f"{prefix}node",
                metadata,
                Column("node", String(NAME_LENGTH), primary_key=True),
                #: One start of one worker: a restart has another, and so has a second worker of the same name.
                Column("boot_id", String(32), nullable=False),
                Column("role", String(NAME_LENGTH)),
                Column("pid", Integer, nullable=False),
                Column("started_at", BigInteger, nullable=False),
                Column("heartbeat_at", BigInteger, nullable=False),
                #: Consumes its own queue and takes runs.
                Column("accepting", Boolean(create_constraint=False), nullable=False),
                Column("pool_size", Integer, nullable=False),
                Column("max_running", Integer, nullable=False),
                #: Tasks at work, and how many ended well or not since the start.
                Column("running", Integer, nullable=False),
                Column("success", BigInteger, nullable=False),
                Column("fail", BigInteger, nullable=False),
                Column("version", String(20), nullable=False),
                #: Which broker it really talks to: two nodes may share this table and not the broker.
                Column("broker_id", String(64)),
                #: Names of the queues it consumes, as JSON.
                Column("queues", Text),
                schema=schema,
                **OPTIONS,
            ),
            lease=Table(
                f"{prefix}lease",
                metadata,
                Column("name", String(NAME_LENGTH), primary_key=True),
                Column("owner", String(NAME_LENGTH), nullable=False),
                #: Grows with each change of owner: whoever acts under an older one has been deposed.
                Column("epoch", BigInteger, nullable=False),
                Column("expires_at", BigInteger, nullable=False),
                schema=schema,
                **OPTIONS,
            ),
        )

    def __iter__(self) -> Iterator[Table]:
        return iter((self.version, self.node, self.lease))
