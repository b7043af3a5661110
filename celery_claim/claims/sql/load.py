"""Rows out of the database, as the handler gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sqlalchemy import inspect
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from celery_claim.claims.sql.columns import ClaimTable
from celery_claim.claims.sql.statements import Statements
from celery_claim.database import Link
from celery_claim.exceptions import ClaimError


@dataclass(frozen=True)
class Unreadable:
    """A row of ours whose stored values cannot be decoded; the others of its batch can."""

    error: Exception
    #: How often it was retried before.
    retries: int


def load(link: Link, statements: Statements, keys: Sequence[Any], token: str) -> dict[Any, Any]:
    """The rows among `keys` that carry our token, by key in key order: detached objects or Rows, or Unreadable."""
    try:
        return _load(link, statements, keys, token)
    except (ClaimError, SQLAlchemyError):
        raise
    except Exception as error:  # whatever a column type's decoder raises: ValueError, UnicodeDecodeError, LookupError
        if len(keys) == 1:
            return {keys[0]: Unreadable(error, _retries(link, statements, keys[0]))}
    rows: dict[Any, Any] = {}
    for key in keys:
        rows |= load(link, statements, [key], token)
    return rows


def _load(link: Link, statements: Statements, keys: Sequence[Any], token: str) -> dict[Any, Any]:
    parameters = {"keys": keys, "token": token}
    table = statements.of
    if table.entity is None:
        position = list(table.table.columns).index(table.key)
        return {row[position]: row for row in link.execute(statements.won, parameters)}
    with Session(bind=link.connection, autoflush=False, expire_on_commit=False) as session:
        with link.translating():
            objects = session.scalars(statements.won, parameters).unique().all()
        session.expunge_all()
    key_of = key_getter(table.entity, table.key)
    return {key_of(each): each for each in objects}


def _retries(link: Link, statements: Statements, key: Any) -> int:
    if not statements.of.has("retry_count"):
        return 0
    return link.execute(statements.retries, {"keys": [key]}).scalar() or 0


def key_getter(entity: type, column: Any) -> Callable[[Any], Any]:
    """How to read the key off an object of the model."""
    mapper: Any = inspect(entity)
    return attrgetter(mapper.get_property_by_column(column).key)


def count_getter(table: ClaimTable, role: str) -> Callable[[Any], int]:
    """How to read a counter off a loaded row: ``retry_count`` or ``reclaim_count``; 0 where the table has none."""
    column = table.column(role)
    if column is None:
        return lambda row: 0
    if table.entity is None:
        position = list(table.table.columns).index(column)
        return lambda row: row[position] or 0
    attribute = key_getter(table.entity, column)
    return lambda row: attribute(row) or 0


def names_of_values(statements: Statements, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of `Done(values=...)`, checked against the table.

    Raises ValueError for a name that is no column, or one that the claim itself writes.
    """
    table = statements.of
    kept = {column.name for column in table.columns.values()} | {table.key.name}
    for name in values:
        column = table.writable.get(name)
        if column is None:
            raise ValueError(f"Done(values={{{name!r}: ...}}): table {table.name} has no such column")
        if column.name in kept:
            raise ValueError(f"Done(values={{{name!r}: ...}}): the claim itself writes {column.name}")
    return tuple(sorted(values))
