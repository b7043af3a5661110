"""What the database's catalogue says of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from sqlalchemy import Enum, Integer, LargeBinary, MetaData, Numeric, String, Table
from sqlalchemy import inspect as inspector_of
from sqlalchemy.schema import CreateColumn

from celery_claim.claims.sql.columns import TOKEN_LENGTH, ClaimTable
from celery_claim.claims.sql.statements import Statements
from celery_claim.database import Link
from celery_claim.dialects.dialect import StorageFacts
from celery_claim.exceptions import MappingError, did_you_mean


def reflected(link: Link, name: str, schema: str | None) -> Table:
    """The existing table of that name. "schema.table" names a schema as well.

    Names are looked up in the catalogue's lists and never written into a statement before they were found there.
    Raises MappingError when there is no such table or schema.
    """
    with link.translating():
        inspector = inspector_of(link.connection)
        if schema is None and "." in name and name not in _tables(inspector, None):
            schema, name = name.split(".", 1)
        schemas = inspector.get_schema_names()
        if schema is not None and schema not in schemas:
            raise MappingError(
                f"there is no schema {schema[:80]!r} in {link.database.name}.{did_you_mean(schema, schemas)}"
            )
        tables = _tables(inspector, schema)
        if name not in tables:
            raise MappingError(f"there is no table {name[:80]!r} in {link.database.name}.{did_you_mean(name, tables)}")
        return Table(name, MetaData(), schema=schema, autoload_with=link.connection, resolve_fks=False)


def _tables(inspector: object, schema: str | None) -> list[str]:
    tables: list[str] = inspector.get_table_names(schema=schema)  # type: ignore[attr-defined]
    return tables


@dataclass(frozen=True)
class TableFacts:
    """What is in the database, beside what the mapping expects."""

    exists: bool
    preparer: Any = None
    quoted_name: str = ""
    #: Column that the mapping names and the table lacks -> the statement that adds it.
    missing: Mapping[str, str] = field(default_factory=dict)
    token_length: int | None = None
    token_collation: str | None = None
    token_ddl: str = ""
    #: The type of claim_time where it cannot hold seconds.
    time_type: str | None = None
    status_is_enum: bool = False
    #: Claim column -> its type in the table, where that cannot hold what is written.
    wrong_types: Mapping[str, str] = field(default_factory=dict)
    #: Name -> names of its columns, in order; partial indexes that serve claims are left out.
    indexes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Whether this database should have an index of the pending rows only, and has none.
    wants_partial_index: bool = False
    storage: StorageFacts = field(default_factory=StorageFacts)

    @property
    def token_folds_case(self) -> bool:
        return (self.token_collation or "").lower().endswith("_ci")

    def quote(self, name: str) -> str:
        return str(self.preparer.quote(name))

    def quoted_index(self, purpose: str) -> str:
        return self.quote(f"ix_{self.quoted_name.strip('`').strip(chr(34))[:40]}_{purpose}")

    def literal(self, value: Any) -> str:
        return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"


#: What the optional columns have to be able to hold.
_KINDS: Mapping[str, tuple[type, ...]] = {
    "worker_id": (String,),
    "error_message": (String,),
    **dict.fromkeys(("lease_seconds", "retry_count", "reclaim_count", "next_retry_time"), (Integer, Numeric)),
}


def table_facts(link: Link, statements: Statements) -> TableFacts:
    """What the catalogue says of a table that is to be claimed from."""
    table = statements.of
    name, schema = table.table.name, table.table.schema
    with link.translating():
        inspector = inspector_of(link.connection)
        if name not in _tables(inspector, schema):
            return TableFacts(exists=False)
        columns = {
            link.dialect.reflected_name(column["name"]): column for column in inspector.get_columns(name, schema=schema)
        }
        indexes = {str(index["name"]): index for index in inspector.get_indexes(name, schema=schema)}
    dialect = link.connection.dialect
    preparer = dialect.identifier_preparer
    quoted = preparer.format_table(table.table)
    token, since = table.columns["claim_token"], table.columns["claim_time"]
    token_type = columns[token.name]["type"] if token.name in columns else None
    time_type = columns[since.name]["type"] if since.name in columns else None
    status_type = columns[table.status.name]["type"] if table.status.name in columns else None
    partial = [index for index in indexes.values() if _where(index) is not None]
    return TableFacts(
        exists=True,
        preparer=preparer,
        quoted_name=quoted,
        missing={
            column.name: f"ALTER TABLE {quoted} ADD COLUMN {CreateColumn(column).compile(dialect=dialect)}"
            for column in [table.key, *table.columns.values()]
            if column.name not in columns
        },
        token_length=getattr(token_type, "length", None),
        token_collation=link.dialect.collation(
            link.ask, name, schema, token.name, getattr(token_type, "collation", None)
        ),
        token_ddl=f"ALTER TABLE {quoted} {link.dialect.exact_text(preparer.quote(token.name), TOKEN_LENGTH)}",
        time_type=None if time_type is None or isinstance(time_type, Integer) else str(time_type),
        status_is_enum=isinstance(status_type, Enum),
        wrong_types={
            role: str(columns[column.name]["type"])
            for role, column in table.columns.items()
            if role in _KINDS and column.name in columns and not isinstance(columns[column.name]["type"], _KINDS[role])
        },
        indexes={
            key: tuple(column or "" for column in index["column_names"])
            for key, index in indexes.items()
            if _where(index) is None
        },
        wants_partial_index=link.dialect.partial_indexes
        and link.dialect.skips_locked
        and not any(index["column_names"] == [table.key.name] for index in partial),
        storage=link.dialect.storage(link.ask, name, schema),
    )


def _where(index: Any) -> Any:
    options = index.get("dialect_options", {})
    # Compared with None: SQLite's is a clause, and a clause refuses to be true or false.
    return next((options[name] for name in ("postgresql_where", "sqlite_where") if options.get(name) is not None), None)


def key_reader(table: ClaimTable) -> Callable[[str], Any]:
    """Turns a key as a person writes it into one as the table holds it. The reader raises ValueError."""
    kind = table.key.type
    if isinstance(kind, LargeBinary) or kind.python_type is bytes:
        return bytes.fromhex
    if kind.python_type is Decimal:
        return _decimal
    return kind.python_type if kind.python_type in (int, UUID) else str


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation as error:
        raise ValueError(text) from error
