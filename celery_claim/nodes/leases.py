"""What only one may do: a row that says who, until when by the database's clock, and how often that changed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import case, insert, select, update

from celery_claim.database import Link
from celery_claim.dialects import epoch_milliseconds
from celery_claim.exceptions import ValueRefused
from celery_claim.nodes.sql.tables import NodeTables


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
    lease = tables.lease
    now = epoch_milliseconds()
    # One statement decides: of any number of callers at an expired lease one changes the row, and the others' own
    # condition is not true any more. `epoch` before `owner`: MySQL assigns from left to right.
    taken = link.execute(
        update(lease)
        .ordered_values(
            (lease.c.epoch, case((lease.c.owner == owner, lease.c.epoch), else_=lease.c.epoch + 1)),
            (lease.c.owner, owner),
            (lease.c.expires_at, now + ttl_ms),
        )
        .where(lease.c.name == name, (lease.c.owner == owner) | (lease.c.expires_at <= now))
    )
    if not taken.rowcount:
        # No row yet, or another owner's; the key decides between two who make it. A driver that counts changed rows
        # only says 0 to a renewal within the same millisecond as well: reading tells.
        with suppress(ValueRefused):
            if read(link, tables, name) is None:
                link.execute(insert(lease).values(name=name, owner=owner, epoch=1, expires_at=now + ttl_ms))
    held = read(link, tables, name)
    return held if held is not None and held.owner == owner and held.left_ms > 0 else None


def read(link: Link, tables: NodeTables, name: str) -> Lease | None:
    """Who holds a lease; None when nobody ever did."""
    lease = tables.lease
    left = (lease.c.expires_at - epoch_milliseconds()).label("left_ms")
    row = link.execute(select(lease.c.owner, lease.c.epoch, left).where(lease.c.name == name)).mappings().first()
    return None if row is None else Lease(name, **row)


def release(link: Link, tables: NodeTables, name: str, owner: str) -> None:
    """Give a lease up, if it is ours, so that the next need not wait for its end."""
    lease = tables.lease
    link.execute(update(lease).values(expires_at=0).where(lease.c.name == name, lease.c.owner == owner))
