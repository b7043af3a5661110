"""Every statement on nodes and leases, each under a name."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

from sqlalchemy import (
    BigInteger,
    Delete,
    Insert,
    Select,
    String,
    Update,
    bindparam,
    case,
    delete,
    insert,
    select,
    update,
)

from celery_claim.dialects import epoch_milliseconds
from celery_claim.nodes.sql.tables import NodeTables


def _value(name: str, kind: Any = BigInteger) -> Any:
    return bindparam(name, type_=kind())


class NodeStatements:
    """The statements for one set of tables, built once."""

    def __init__(self, tables: NodeTables) -> None:
        self._node, self._lease = tables.node, tables.lease
        self._now = epoch_milliseconds()

    # ---- leases

    @cached_property
    def take_lease(self) -> Update:
        """Take a lease that is ours or over.

        One statement decides: of any number of callers at an expired lease one changes the row, and the others' own
        condition is not true any more. `epoch` comes before `owner`: MySQL assigns from left to right.
        """
        lease, owner = self._lease.c, _value("by", String)
        return (
            update(self._lease)
            .ordered_values(
                (lease.epoch, case((lease.owner == owner, lease.epoch), else_=lease.epoch + 1)),
                (lease.owner, owner),
                (lease.expires_at, self._now + _value("ttl")),
            )
            .where(lease.name == _value("lease_name", String), (lease.owner == owner) | (lease.expires_at <= self._now))
        )

    @cached_property
    def add_lease(self) -> Insert:
        """The first lease of a name; its key decides between two who make it."""
        return insert(self._lease).values(
            name=_value("lease_name", String), owner=_value("by", String), epoch=1, expires_at=self._now + _value("ttl")
        )

    @cached_property
    def read_lease(self) -> Select[Any]:
        lease = self._lease.c
        left = (lease.expires_at - self._now).label("left_ms")
        return select(lease.owner, lease.epoch, left).where(lease.name == _value("lease_name", String))

    @cached_property
    def give_lease_up(self) -> Update:
        lease = self._lease.c
        return (
            update(self._lease)
            .values(expires_at=0)
            .where(lease.name == _value("lease_name", String), lease.owner == _value("by", String))
        )

    # ---- the register

    @cached_property
    def boot_of(self) -> Select[Any]:
        """Which start stands in the register under a name."""
        return select(self._node.c.boot_id).where(self._node.c.node == _value("node_name", String))

    def enter(self, **columns: Any) -> Insert:
        now = self._now
        return insert(self._node).values(started_at=now, heartbeat_at=now, **columns)

    def take_over(self, **columns: Any) -> Update:
        """The row of an earlier start becomes ours, whatever it says."""
        now = self._now
        change = update(self._node).values(started_at=now, heartbeat_at=now, **columns)
        return change.where(self._node.c.node == _value("node_name", String))

    def beat(self, **columns: Any) -> Update:
        """Tell that we live, as long as the row is ours."""
        return update(self._node).values(heartbeat_at=self._now, **columns).where(*self._ours)

    @cached_property
    def leave(self) -> Delete:
        return delete(self._node).where(*self._ours)

    @cached_property
    def silent(self) -> Select[Any]:
        """Names of nodes that have not been heard of for so long."""
        return select(self._node.c.node).where(self._node.c.heartbeat_at < self._now - _value("silent_ms"))

    @cached_property
    def forget(self) -> Delete:
        """A silent node leaves the register, unless it has been heard of since."""
        node = self._node.c
        gone = node.heartbeat_at < self._now - _value("silent_ms")
        return delete(self._node).where(node.node == _value("node_name", String), gone)

    @cached_property
    def all_nodes(self) -> Select[Any]:
        node = self._node.c
        return select(self._node, (self._now - node.heartbeat_at).label("silent_ms")).order_by(node.node)

    @property
    def _ours(self) -> tuple[Any, ...]:
        node = self._node.c
        return (node.node == _value("node_name", String), node.boot_id == _value("boot", String))


@cache
def statements_of(tables: NodeTables) -> NodeStatements:
    """The statements for a set of tables."""
    return NodeStatements(tables)
