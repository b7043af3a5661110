"""Make celery_claim's own tables, in a fleet that starts all at once."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from sqlalchemy import Executable, Table, insert, select
from sqlalchemy import inspect as inspector_of
from sqlalchemy.schema import CreateIndex, CreateTable

from celery_claim.database import Database, Link
from celery_claim.dialects import epoch_milliseconds
from celery_claim.exceptions import ClaimError, ValueRefused

#: Raised by one with each change of celery_claim's own tables.
SCHEMA_VERSION = 2


def missing_tables(link: Link, tables: Iterable[Table]) -> list[str]:
    """Names of the tables that the database does not have."""
    return [table.fullname for table in tables if not _exists(link, table)]


def create_tables(database: Database, tables: Iterable[Table]) -> list[str]:
    """Make the tables and indexes that do not exist; returns the names of the tables that were made.

    A crash in between leaves a table without some of its indexes; the next call makes those.
    """
    made = []
    with database.linked() as link:
        for table in tables:
            if not _exists(link, table):
                _unless_a_twin_did(link, CreateTable(table, if_not_exists=True), table)
                made.append(table.fullname)
            for index in sorted(table.indexes, key=lambda each: str(each.name)):
                if str(index.name) not in _indexes(link, table):
                    _unless_a_twin_did(link, CreateIndex(index), table, str(index.name))
    return made


def _unless_a_twin_did(link: Link, statement: Executable, table: Table, index: str | None = None) -> None:
    """Run a statement that another process may run in the same moment: not every server knows IF NOT EXISTS for an
    index, and PostgreSQL's own lets two processes through and then refuses the second."""
    try:
        link.execute(statement)
    except ClaimError:
        if not (index in _indexes(link, table) if index else _exists(link, table)):
            raise


def _exists(link: Link, table: Table) -> bool:
    with link.translating():
        return inspector_of(link.connection).has_table(table.name, schema=table.schema)


def _indexes(link: Link, table: Table) -> set[str | None]:
    with link.translating():
        return {each["name"] for each in inspector_of(link.connection).get_indexes(table.name, table.schema)}


def record_version(database: Database, table: Table) -> None:
    """Write down which layout of the tables this database has."""
    with database.linked() as link:
        if link.execute(select(table.c.version).where(table.c.version == SCHEMA_VERSION)).first() is None:
            # A fleet starts at once: whoever is second finds the row, by its key.
            with suppress(ValueRefused):
                link.execute(insert(table).values(version=SCHEMA_VERSION, created_at=epoch_milliseconds()))
