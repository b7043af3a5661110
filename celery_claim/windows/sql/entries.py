"""The statements on ordinary beat entries."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from sqlalchemy import BigInteger, Insert, Select, String, Text, Update, bindparam, exists, insert, select, update

from celery_claim.dialects import epoch_milliseconds
from celery_claim.windows.sql.tables import WindowTables


def _value(name: str, kind: Any = BigInteger) -> Any:
    return bindparam(name, type_=kind())


class EntryStatements:
    """The statements for one set of tables, built once."""

    def __init__(self, tables: WindowTables) -> None:
        self._entry, self._lease = tables.entry, tables.nodes.lease

    @cached_property
    def all_entries(self) -> Select[Any]:
        return select(self._entry)

    @cached_property
    def add(self) -> Insert:
        return insert(self._entry).values(
            name=_value("entry_name", String),
            last_run_at=_value("at"),
            schedule=_value("text", Text),
            total_run_count=0,
        )

    @cached_property
    def restart(self) -> Update:
        """An entry whose schedule was changed begins anew."""
        entry = self._entry.c
        return (
            update(self._entry)
            .values(last_run_at=_value("at"), schedule=_value("text", Text))
            .where(entry.name == _value("entry_name", String), entry.schedule != _value("text", Text))
        )

    @cached_property
    def claim(self) -> Update:
        """Write down that an entry is sent now: only where nobody has since we looked, and under our lease.

        A beat that was frozen between its look and this statement finds another last_run_at, or another's epoch.
        """
        entry, lease = self._entry.c, self._lease.c
        ours = exists().where(
            lease.name == _value("lease_name", String),
            lease.owner == _value("by", String),
            lease.epoch == _value("epoch"),
            lease.expires_at > epoch_milliseconds(),
        )
        return (
            update(self._entry)
            .values(last_run_at=_value("at"), total_run_count=entry.total_run_count + 1)
            .where(entry.name == _value("entry_name", String), entry.last_run_at == _value("seen"), ours)
        )

    @cached_property
    def undo(self) -> Update:
        """A message is not out: the entry is as due as it was.

        Both numbers tell which sending it was. The time alone could be another's: clocks differ, and go back.
        """
        entry = self._entry.c
        return (
            update(self._entry)
            .values(last_run_at=_value("seen"), total_run_count=entry.total_run_count - 1)
            .where(
                entry.name == _value("entry_name", String),
                entry.last_run_at == _value("at"),
                entry.total_run_count == _value("counted"),
            )
        )
