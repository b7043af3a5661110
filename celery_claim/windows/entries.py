"""Ordinary beat entries: when each was sent last, and that it is sent once however many beats there are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from celery_claim.database import Link
from celery_claim.exceptions import ValueRefused
from celery_claim.nodes.leases import Lease
from celery_claim.windows.sql.entries import EntryStatements


@dataclass(frozen=True)
class Sent:
    """When an entry was sent last, in milliseconds since 1970, and how often it has been."""

    last_run_at: int
    total_run_count: int


def load(link: Link, statements: EntryStatements, schedules: Mapping[str, str], now: int) -> dict[str, Sent]:
    """When each entry was sent last; a new one, and one whose schedule was changed, begins at `now`.

    `schedules`: name -> the schedule as text. Repeating it after a crash changes nothing.
    """
    known = {row["name"]: row for row in link.execute(statements.all_entries).mappings()}
    for name, text in schedules.items():
        values = {"entry_name": name, "at": now, "text": text}
        if name not in known:
            with suppress(ValueRefused):  # another beat starts at the same time and was faster
                link.execute(statements.add, values)
        elif known[name]["schedule"] != text:
            link.execute(statements.restart, values)
    rows = link.execute(statements.all_entries).mappings()
    return {row["name"]: Sent(row["last_run_at"], row["total_run_count"]) for row in rows if row["name"] in schedules}


def claim(link: Link, statements: EntryStatements, lease: Lease, name: str, *, seen: int, at: int) -> bool:
    """Whether this entry is ours to send now; `seen` is when it was sent last as far as we know, `at` is now.

    Crash after it: this one sending is lost, as with every beat that notes first and sends then; sending first would
    do it twice.
    """
    ours = {"lease_name": lease.name, "by": lease.owner, "epoch": lease.epoch}
    return bool(link.execute(statements.claim, {**ours, "entry_name": name, "seen": seen, "at": at}).rowcount)


def undo(link: Link, statements: EntryStatements, name: str, *, seen: int, at: int) -> None:
    """Take a claim back whose message could not be sent."""
    link.execute(statements.undo, {"entry_name": name, "seen": seen, "at": at})
