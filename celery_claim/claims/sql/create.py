"""Make tables that do not exist."""

from __future__ import annotations

from contextlib import suppress

from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, insert, select
from sqlalchemy import inspect as inspector_of
from sqlalchemy.schema import CreateTable

from celery_claim.claims.table import Claims
from celery_claim.database import Database
from celery_claim.dialects import epoch_seconds
from celery_claim.exceptions import ValueRefused

#: Raised by one with each change of celery_claim's own tables.
SCHEMA_VERSION = 1


def create_missing(claims: Claims) -> list[str]:
    """Make the table of a model, with its indexes, unless it exists; returns what was made."""
    with claims.linked() as link, link.translating():
        table = claims.table.table
        if inspector_of(link.connection).has_table(table.name, schema=table.schema):
            return []
        table.create(link.connection)
        return [claims.table.name]


def create_version_table(database: Database, prefix: str, schema: str | None) -> list[str]:
    """Record which layout of celery_claim's own tables a database has; returns what was made."""
    table = Table(
        f"{prefix}version",
        MetaData(),
        Column("version", Integer, primary_key=True, autoincrement=False),
        #: Milliseconds since 1970, as all times in our own tables.
        Column("created_at", BigInteger, nullable=False),
        schema=schema,
    )
    made = []
    with database.linked() as link, link.translating():
        if not inspector_of(link.connection).has_table(table.name, schema=schema):
            link.execute(CreateTable(table, if_not_exists=True))
            made.append(table.fullname)
        if link.execute(select(table.c.version).where(table.c.version == SCHEMA_VERSION)).first() is None:
            # A fleet starts at once: whoever is second finds the row, by its key.
            with suppress(ValueRefused):
                link.execute(insert(table).values(version=SCHEMA_VERSION, created_at=epoch_seconds() * 1000))
    return made
