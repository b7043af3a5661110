"""Ordinary beat entries: when each was sent last, and that it is sent once however many beats there are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from celery_claim.database import Link
from celery_claim.exceptions import ValueRefused
from celery_claim.nodes.leases import Lease
from celery_claim.windows.sql.entries import EntryStatements


@dataclass(frozen=True)
class Sent:
    """When an entry was sent last, in milliseconds since 1970, and how often it has been."""

    last_run_at: int
    total_run_count: int


@dataclass(frozen=True)
class Sending:
    """One sending of an entry: what stood in the table before it, and when it is."""

    name: str
    before: Sent
    at: int

    @property
    def after(self) -> Sent:
        """What stands in the table once it is written down."""
        return Sent(self.at, self.before.total_run_count + 1)


def load(link: Link, statements: EntryStatements, schedules: Mapping[str, str], now: int) -> dict[str, Sent]:
    """When each entry was sent last; a new one, and one whose schedule was changed, begins at `now`.

    `schedules`: name -> the schedule as text. Repeating it after a crash changes nothing.
    """
    known = _stored(link, statements)
    changed = [name for name, text in schedules.items() if name not in known or known[name]["schedule"] != text]
    for name in changed:
        values = {"entry_name": name, "at": now, "text": schedules[name]}
        if name in known:
            link.execute(statements.restart, values)
        else:
            with suppress(ValueRefused):  # another beat starts at the same time and was faster
                link.execute(statements.add, values)
    rows = _stored(link, statements) if changed else known
    return {name: Sent(rows[name]["last_run_at"], rows[name]["total_run_count"]) for name in schedules if name in rows}


def _stored(link: Link, statements: EntryStatements) -> dict[str, Mapping[str, Any]]:
    return {row["name"]: dict(row) for row in link.execute(statements.all_entries).mappings()}


def claim(link: Link, statements: EntryStatements, lease: Lease, sending: Sending) -> bool:
    """Whether this sending is ours: it is written down, under our lease and only if nobody has sent since we looked.

    Crash after it: this one sending is lost, as with every beat that notes first and sends then; sending first would
    do it twice. No answer: it may be written down, and `undo` sets that right.
    """
    ours = {"lease_name": lease.name, "by": lease.owner, "epoch": lease.epoch}
    values = {"entry_name": sending.name, "seen": sending.before.last_run_at, "at": sending.at}
    return bool(link.execute(statements.claim, {**ours, **values}).rowcount)


def undo(link: Link, statements: EntryStatements, sending: Sending) -> bool:
    """Take back what was written down of a sending whose message is not out; whether it stood there.

    Anybody's business at any time, lease or not, and repeating it changes nothing: it finds the row only as this very
    sending left it. What another beat, or a changed schedule, has written since stays.
    """
    values = {
        "entry_name": sending.name,
        "seen": sending.before.last_run_at,
        "at": sending.at,
        "counted": sending.after.total_run_count,
    }
    return bool(link.execute(statements.undo, values).rowcount)
