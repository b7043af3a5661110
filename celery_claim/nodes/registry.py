"""The register of nodes: a worker enters itself, tells that it lives, and leaves.

A row belongs to the latest start under its name (boot id). A node that was killed, frozen or cut off stays in it and is
told from the living by its heartbeat, in the database's time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from sqlalchemy import delete, insert, select, update

from celery_claim.database import Link
from celery_claim.dialects import epoch_milliseconds
from celery_claim.exceptions import ValueRefused
from celery_claim.nodes.sql.tables import NAME_LENGTH, NodeTables


@dataclass(frozen=True)
class Identity:
    """One start of one worker."""

    name: str
    role: str | None = None
    boot_id: str = field(default_factory=lambda: uuid4().hex)

    @property
    def queue(self) -> str:
        """The queue that only this node consumes."""
        return queue_of(self.name)


@dataclass(frozen=True)
class Vitals:
    """What a node tells of itself with each heartbeat."""

    accepting: bool
    pool_size: int
    max_running: int
    running: int
    success: int = 0
    fail: int = 0
    version: str = ""
    broker_id: str | None = None
    queues: Sequence[str] = ()

    @property
    def columns(self) -> dict[str, Any]:
        return {
            "accepting": self.accepting,
            "pool_size": self.pool_size,
            "max_running": self.max_running,
            "running": self.running,
            "success": self.success,
            "fail": self.fail,
            "version": self.version,
            "broker_id": self.broker_id,
            "queues": json.dumps(sorted(self.queues)),
        }


def queue_of(node: str) -> str:
    """The queue that only this node consumes."""
    return f"claim.{node}"


def enter(link: Link, tables: NodeTables, node: Identity, vitals: Vitals) -> bool:
    """Enter the register, also where an earlier start stands; returns whether that one still seemed to live.

    Crash after it: the row stays, and its heartbeat grows old.
    """
    table = tables.node
    row = {
        "boot_id": node.boot_id,
        "role": node.role and node.role[:NAME_LENGTH],
        "pid": os.getpid(),
        "started_at": epoch_milliseconds(),
        "heartbeat_at": epoch_milliseconds(),
        **vitals.columns,
    }
    before = link.execute(
        select(table.c.boot_id, (epoch_milliseconds() - table.c.heartbeat_at).label("silent")).where(
            table.c.node == node.name
        )
    ).first()
    if before is None:
        try:
            link.execute(insert(table).values(node=node.name, **row))
            return False
        except ValueRefused:  # another start of the same name, in the same moment
            pass
    link.execute(update(table).values(**row).where(table.c.node == node.name))
    return before is None or before.boot_id != node.boot_id


def beat(link: Link, tables: NodeTables, node: Identity, vitals: Vitals) -> bool:
    """Tell that we live; False when another start has taken our name."""
    table = tables.node
    values = {**vitals.columns, "heartbeat_at": epoch_milliseconds()}
    ours = (table.c.node == node.name, table.c.boot_id == node.boot_id)
    if link.execute(update(table).values(**values).where(*ours)).rowcount:
        return True
    owner = link.execute(select(table.c.boot_id).where(table.c.node == node.name)).scalar()
    if owner is None:  # somebody forgot a node that lives
        with suppress(ValueRefused):
            enter(link, tables, node, vitals)
    return owner in (None, node.boot_id)


def leave(link: Link, tables: NodeTables, node: Identity) -> None:
    """Leave the register, unless a later start stands there."""
    table = tables.node
    link.execute(delete(table).where(table.c.node == node.name, table.c.boot_id == node.boot_id))


def forget_silent(link: Link, tables: NodeTables, *, silent_ms: int) -> list[str]:
    """Take out nodes that have not been heard of for so long; returns their names."""
    table = tables.node
    gone = table.c.heartbeat_at < epoch_milliseconds() - silent_ms
    names = list(link.execute(select(table.c.node).where(gone)).scalars())
    return [name for name in names if link.execute(delete(table).where(table.c.node == name, gone)).rowcount]


def nodes(link: Link, tables: NodeTables, *, timeout_ms: int) -> list[dict[str, Any]]:
    """Every node of the register as a row of its table, with `alive` and `silent_ms`, by name."""
    table = tables.node
    silent = (epoch_milliseconds() - table.c.heartbeat_at).label("silent_ms")
    rows = link.execute(select(table, silent).order_by(table.c.node)).mappings()
    return [{**row, "alive": row["silent_ms"] < timeout_ms} for row in rows]
