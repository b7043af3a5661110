"""A table that can be claimed: the mixin that adds the columns, and the mapping onto columns that exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from sqlalchemy import (
    CHAR,
    BigInteger,
    Column,
    ColumnElement,
    Date,
    DateTime,
    Index,
    Integer,
    Interval,
    SmallInteger,
    String,
    Table,
    Time,
    event,
)
from sqlalchemy import inspect as sqlalchemy_inspect
from sqlalchemy.dialects.mysql import CHAR as MYSQL_CHAR
from sqlalchemy.dialects.mysql import TINYINT
from sqlalchemy.orm import Mapped, MappedAsDataclass, Mapper, mapped_column

from celery_claim.exceptions import MappingError, did_you_mean
from celery_claim.states import REQUIRED_STATUSES, Status

#: What each column is for; the first three are required on a mapped table. The mixin has no created_time: a table
#: that has one (seconds since 1970) tells the age of its oldest pending row.
ROLES = (
    "status",
    "claim_time",
    "claim_token",
    "lease_seconds",
    "worker_id",
    "retry_count",
    "reclaim_count",
    "next_retry_time",
    "error_message",
    "created_time",
)
REQUIRED_ROLES = ROLES[:3]
#: Types a column called created_time has in many tables, from which no seconds can be read.
NO_SECONDS = (DateTime, Date, Time, Interval, String)
TOKEN_LENGTH = 32
ERROR_LENGTH = 500


def _status_type() -> Any:
    return SmallInteger().with_variant(TINYINT(unsigned=True), "mysql", "mariadb")


def _token_type() -> Any:
    # Compared byte by byte: a collation that folds case would take one worker's token for another's.
    binary = MYSQL_CHAR(TOKEN_LENGTH, charset="ascii", collation="ascii_bin")
    return CHAR(TOKEN_LENGTH).with_variant(binary, "mysql", "mariadb")


class _DataclassClaimable(MappedAsDataclass):
    """`Claimable` for a declarative base that is a MappedAsDataclass; its columns are not constructor arguments."""

    status: Mapped[int] = mapped_column(_status_type(), nullable=False, default=0, server_default="0", init=False)
    claim_time: Mapped[int | None] = mapped_column(BigInteger, default=None, init=False)
    lease_seconds: Mapped[int | None] = mapped_column(Integer, default=None, init=False)
    claim_token: Mapped[str | None] = mapped_column(_token_type(), default=None, init=False, repr=False)
    worker_id: Mapped[str | None] = mapped_column(String(128), default=None, init=False)
    retry_count: Mapped[int] = mapped_column(SmallInteger, nullable=False, default=0, server_default="0", init=False)
    reclaim_count: Mapped[int] = mapped_column(SmallInteger, nullable=False, default=0, server_default="0", init=False)
    next_retry_time: Mapped[int | None] = mapped_column(BigInteger, default=None, init=False)
    error_message: Mapped[str | None] = mapped_column(String(ERROR_LENGTH), default=None, init=False)


class Claimable:
    """Adds the columns and indexes that a ClaimTask needs to a declarative model.

    Put it before the base: ``class Mail(Claimable, Base)``. On a MappedAsDataclass base use ``Claimable.dataclass``;
    with ``__table__`` the columns are yours to declare, and ``columns=`` of the task maps other names.
    """

    dataclass = _DataclassClaimable

    status: Mapped[int] = mapped_column(_status_type(), nullable=False, default=0, server_default="0")
    #: Seconds since 1970 by the database's clock: the last claim, renewal or queueing.
    claim_time: Mapped[int | None] = mapped_column(BigInteger)
    #: Written by the claim, so that each row is judged by the lease its owner was promised.
    lease_seconds: Mapped[int | None] = mapped_column(Integer)
    #: Fresh per claim; every later write of the owner compares it.
    claim_token: Mapped[str | None] = mapped_column(_token_type())
    worker_id: Mapped[str | None] = mapped_column(String(128))
    retry_count: Mapped[int] = mapped_column(SmallInteger, nullable=False, default=0, server_default="0")
    #: How often the row came back because its owner died or lost its lease.
    reclaim_count: Mapped[int] = mapped_column(SmallInteger, nullable=False, default=0, server_default="0")
    #: When a row in state RETRYING is due.
    next_retry_time: Mapped[int | None] = mapped_column(BigInteger)
    error_message: Mapped[str | None] = mapped_column(String(ERROR_LENGTH))


@event.listens_for(Claimable, "instrument_class", propagate=True)
@event.listens_for(_DataclassClaimable, "instrument_class", propagate=True)
def _add_indexes(mapper: Mapper[Any], class_: type) -> None:
    """Attach the indexes to the finished table, where a user's own __table_args__ cannot drop them."""
    table = mapper.local_table
    if not isinstance(table, Table) or "status" not in table.c or len(table.primary_key) != 1:
        return
    (key,) = table.primary_key
    wanted: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [("claim", (table.c.status, key), {})]
    if "next_retry_time" in table.c:
        wanted.append(("retry", (table.c.status, table.c.next_retry_time), {}))
    pending = table.c.status == 0
    wanted.append(("pending", (key,), {"postgresql_where": pending, "sqlite_where": pending}))
    present = {(tuple(index.columns), _is_partial(index)) for index in table.indexes}
    for purpose, columns, options in wanted:
        if (columns, bool(options)) in present:
            continue
        index = Index(f"ix_{table.name[:40]}_{purpose}", *columns, **options)
        if options:
            # Elsewhere it would become a plain index on the primary key.
            index.ddl_if(dialect=cast(str, ("postgresql", "sqlite")))
        if index.table is None:
            table.append_constraint(index)


def _is_partial(index: Index) -> bool:
    return index.dialect_options["postgresql"]["where"] is not None


@dataclass(frozen=True, eq=False)
class ClaimTable:
    """A table, its key, and which column and value stands for what."""

    table: Table
    key: Column[Any]
    columns: Mapping[str, Column[Any]]
    values: Mapping[Status, Any]
    #: The ORM class whose objects a handler gets; None for a plain table.
    entity: type | None = None
    #: Where one table holds several classes: what tells this class's rows.
    only: ColumnElement[bool] | None = None
    #: Names that a handler's `Done(values=...)` may use: attributes of the entity, else columns.
    writable: Mapping[str, Column[Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.table.fullname

    @property
    def status(self) -> Column[Any]:
        return self.columns["status"]

    def column(self, role: str) -> Column[Any] | None:
        return self.columns.get(role)

    def has(self, *roles: str) -> bool:
        return all(role in self.columns for role in roles)

    def knows(self, status: Status) -> bool:
        return status in self.values

    @property
    def delays(self) -> bool:
        """Whether a retry can wait: it has a column for when it is due."""
        return self.has("next_retry_time")

    @property
    def waits_as_pending(self) -> bool:
        """Whether a delayed row stays PENDING with a due time, for want of a RETRYING value of its own."""
        return self.delays and not self.knows(Status.RETRYING)

    def width(self, role: str, default: int) -> int:
        """How many characters the column of this role holds."""
        column = self.column(role)
        return getattr(column.type, "length", None) or default if column is not None else default

    @classmethod
    def of_model(cls, model: Any, columns: Mapping[str, str], values: Mapping[Any, Any] | None) -> ClaimTable:
        """The claimable table of an ORM class or a Table.

        Raises MappingError naming the table and the column, value or key that does not fit.
        """
        if isinstance(model, Table):
            return cls._mapped(model, columns, values)
        mapper = sqlalchemy_inspect(model, raiseerr=False)
        if not isinstance(mapper, Mapper):
            raise MappingError(f"model={model!r} is neither an ORM class nor a sqlalchemy.Table")
        attributes: dict[str, Any] = {attribute.key: attribute.columns[0] for attribute in mapper.column_attrs}
        status_name = columns.get("status", "status")
        status = attributes.get(status_name)
        if status is None:
            names = {column.name: column for column in attributes.values()}
            status = names.get(status_name)
        if status is None:
            raise _no_column(str(mapper.local_table), "status", status_name, attributes)
        table = cast(Table, status.table)
        own = {name: column for name, column in attributes.items() if column.table is table}
        only = None
        if mapper.inherits is not None and mapper.polymorphic_on is not None:
            identities = [each.polymorphic_identity for each in mapper.self_and_descendants]
            only = mapper.polymorphic_on.in_(identities)
        return cls._mapped(table, columns, values, entity=mapper.class_, only=only, attributes=own)

    @classmethod
    def _mapped(
        cls,
        table: Table,
        columns: Mapping[str, str],
        values: Mapping[Any, Any] | None,
        *,
        entity: type | None = None,
        only: ColumnElement[bool] | None = None,
        attributes: Mapping[str, Column[Any]] | None = None,
    ) -> ClaimTable:
        primary = list(table.primary_key)
        if len(primary) != 1:
            found = "no primary key" if not primary else f"the composite key ({', '.join(c.name for c in primary)})"
            raise MappingError(
                f"table {table.fullname} has {found}; claims need a primary key of exactly one column: "
                "add a surrogate key column and make it the primary key"
            )
        writable = {column.name: column for column in table.columns} | dict(attributes or {})
        mapped = _mapped_columns(table.fullname, writable, columns)
        return cls(
            table=table,
            key=primary[0],
            columns=MappingProxyType(mapped),
            values=MappingProxyType(_mapped_values(table.fullname, values)),
            entity=entity,
            only=only,
            writable=MappingProxyType(writable),
        )


def _mapped_columns(
    table: str, available: Mapping[str, Column[Any]], columns: Mapping[str, str]
) -> dict[str, Column[Any]]:
    for role in columns:
        if role not in ROLES:
            raise MappingError(
                f"table {table}: columns={{{role!r}: ...}} names no claim column; expected some of "
                f"{', '.join(ROLES)}.{did_you_mean(role, ROLES)}"
            )
    mapped = {}
    for role in ROLES:
        name = columns.get(role, role)
        if name is None:
            continue
        if role == "created_time" and name in available and isinstance(available[name].type, NO_SECONDS):
            if role in columns:
                raise MappingError(
                    f"table {table}: {name} is {available[name].type!r}; created_time counts seconds since 1970 in a "
                    "column of whole numbers"
                )
        elif name in available:
            mapped[role] = available[name]
        elif role in REQUIRED_ROLES or role in columns:
            raise _no_column(table, role, name, available)
    for role in REQUIRED_ROLES:
        if role not in mapped:
            raise MappingError(f"table {table}: the claim column {role} is required, it cannot be mapped to None")
    taken: dict[str, str] = {}
    for role, column in mapped.items():
        if column.name in taken:
            raise MappingError(f"table {table}: column {column.name} cannot be both {taken[column.name]} and {role}")
        taken[column.name] = role
    return mapped


def _no_column(table: str, role: str, name: str, available: Mapping[str, Any]) -> MappingError:
    return MappingError(
        f"table {table} has no column {name[:80]!r} for {role}.{did_you_mean(name, available)} Map it with "
        f"columns={{{role!r}: <its name>}}, or add it (`celery claim check` prints the ALTER TABLE)"
    )


def _mapped_values(table: str, values: Mapping[Any, Any] | None) -> dict[Status, Any]:
    """Which value stands for which status.

    Without `values` the numbers of Status. With it, a required status that is left out keeps its number; RETRYING,
    QUEUED and CANCELLED that are left out do not exist in this table: their numbers may mean something else there.
    """
    if values is None:
        return {status: int(status) for status in Status}
    mapped: dict[Status, Any] = {status: int(status) for status in REQUIRED_STATUSES}
    for written, value in values.items():
        status = _status_named(table, written)
        if value is None:
            if status in REQUIRED_STATUSES:
                raise MappingError(f"table {table}: values= needs a value for {status.name}, it cannot be None")
            continue
        mapped[status] = int(value) if isinstance(value, Status) else value
    seen: dict[Any, Status] = {}
    for status, value in mapped.items():
        if value in seen:
            raise MappingError(
                f"table {table}: values= has {value!r} for both {seen[value].name} and {status.name}; "
                "each status needs a value of its own"
            )
        seen[value] = status
    return mapped


def _status_named(table: str, written: Any) -> Status:
    names = {status.name.lower(): status for status in Status}
    if isinstance(written, str) and written.lower() in names:
        return names[written.lower()]
    if isinstance(written, int) and not isinstance(written, bool) and written in set(Status):
        return Status(written)
    raise MappingError(
        f"table {table}: values={{{written!r}: ...}} names no status; expected some of {', '.join(names)}."
        f"{did_you_mean(str(written).lower(), names)}"
    )
