"""What only one may do: a row that says who, until when by the database's clock, and how often that changed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from celery_claim.database import Link
from celery_claim.exceptions import ValueRefused
from celery_claim.nodes.sql.statements import statements_of
from celery_claim.nodes.sql.tables import NodeTables

#: The lease whose owner is the main node.
MAIN_LEASE = "main"


@dataclass(frozen=True)
class Lease:
    """A lease as it stood when it was read."""

    name: str
    owner: str
    #: Grows with each change of owner.
    epoch: int
    #: Milliseconds left by the database's clock; zero or less: anybody may take it.
    left_ms: int


def acquire(link: Link, tables: NodeTables, name: str, owner: str, *, ttl_ms: int) -> Lease | None:
    """Take or keep a lease; None when somebody else holds it.

    Crash after it: the lease ends with its time, and another takes it; nothing is left behind.
    """
    statements = statements_of(tables)
    values = {"lease_name": name, "by": owner, "ttl": ttl_ms}
    if not link.execute(statements.take_lease, values).rowcount and read(link, tables, name) is None:
        with suppress(ValueRefused):  # another made it in the same moment
            link.execute(statements.add_lease, values)
    # Read, not counted: a driver that counts changed rows only says 0 to a second renewal in one millisecond.
    held = read(link, tables, name)
    return held if held is not None and held.owner == owner and held.left_ms > 0 else None


def read(link: Link, tables: NodeTables, name: str) -> Lease | None:
    """Who holds a lease; None when nobody ever did."""
    row = link.execute(statements_of(tables).read_lease, {"lease_name": name}).mappings().first()
    return None if row is None else Lease(name, **row)


def release(link: Link, tables: NodeTables, name: str, owner: str) -> None:
    """Give a lease up, if it is ours, so that the next need not wait for its end."""
    link.execute(statements_of(tables).give_lease_up, {"lease_name": name, "by": owner})
