"""The register of nodes: a worker enters itself, tells that it lives, and leaves.

A row belongs to the latest start under its name (boot id). A node that was killed, frozen or cut off stays in it and is
told from the living by its heartbeat, in the database's time.
"""

from __future__ import annotations

import os
from typing import Any

from celery_claim.database import Link
from celery_claim.exceptions import ValueRefused
from celery_claim.nodes.identity import Identity, Vitals
from celery_claim.nodes.sql.statements import statements_of
from celery_claim.nodes.sql.tables import NAME_LENGTH, NodeTables


def enter(link: Link, tables: NodeTables, node: Identity, vitals: Vitals) -> None:
    """Enter the register, also where an earlier start of this name stands.

    Crash after it: the row stays, and its heartbeat grows old.
    """
    statements = statements_of(tables)
    role = node.role and node.role[:NAME_LENGTH]
    columns = {"boot_id": node.boot_id, "role": role, "pid": os.getpid(), **vitals.columns}
    if link.execute(statements.boot_of, {"node_name": node.name}).first() is None:
        try:
            link.execute(statements.enter(node=node.name, **columns))
            return
        except ValueRefused:  # another start of the same name, in the same moment
            pass
    link.execute(statements.take_over(**columns), {"node_name": node.name})


def beat(link: Link, tables: NodeTables, node: Identity, vitals: Vitals) -> bool:
    """Tell that we live; False when another start has taken our name."""
    statements = statements_of(tables)
    ours = {"node_name": node.name, "boot": node.boot_id}
    if link.execute(statements.beat(**vitals.columns), ours).rowcount:
        return True
    owner = link.execute(statements.boot_of, {"node_name": node.name}).scalar()
    if owner is None:  # somebody forgot a node that lives
        enter(link, tables, node, vitals)
    return owner in (None, node.boot_id)


def leave(link: Link, tables: NodeTables, node: Identity) -> None:
    """Leave the register, unless a later start stands there."""
    link.execute(statements_of(tables).leave, {"node_name": node.name, "boot": node.boot_id})


def forget_silent(link: Link, tables: NodeTables, *, silent_ms: int) -> list[str]:
    """Take out nodes that have not been heard of for so long; returns their names."""
    statements = statements_of(tables)
    names = link.execute(statements.silent, {"silent_ms": silent_ms}).scalars().all()
    gone = ((name, {"node_name": name, "silent_ms": silent_ms}) for name in names)
    return [name for name, values in gone if link.execute(statements.forget, values).rowcount]


def nodes(link: Link, tables: NodeTables, *, timeout_ms: int) -> list[dict[str, Any]]:
    """Every node of the register as a row of its table, with `alive` and `silent_ms`, by name."""
    rows = link.execute(statements_of(tables).all_nodes).mappings()
    return [{**row, "alive": row["silent_ms"] < timeout_ms} for row in rows]
