"""The seam between claims and the kinds of database: what a dialect answers, and the words it answers in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sqlalchemy import URL, Column, ColumnElement, Integer, Select, bindparam
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import BigInteger, UserDefinedType

#: Seconds a statement of ours waits for a row lock; every such lock is held for one short statement only.
LOCK_WAIT_SECONDS = 5
#: Seconds until a silent server counts as gone; without it a half-open socket would hang a worker for ever.
SILENCE_SECONDS = 60
CONNECT_SECONDS = 10

#: Runs a query with parameters and returns its rows.
Ask = Callable[..., Sequence[Any]]


class Fault(Enum):
    """What kind of trouble a database error is, as far as a claim is concerned."""

    LOST = auto()  # the connection or the server is gone; the statement may or may not have been done
    READ_ONLY = auto()  # a replica, or a server in the middle of a failover
    UNAVAILABLE = auto()  # cannot connect just now: nobody listens, too many connections
    DENIED = auto()  # will not connect: wrong password, no such database
    CONTENTION = auto()  # deadlock, lock wait, snapshot conflict: the statement was rolled back, try again
    DATA = auto()  # the table refuses a value
    REFUSED = auto()  # anything else: no such column, no privilege, a syntax the server does not know


class NumberList(UserDefinedType[Sequence[int]]):
    """Whole numbers for IN (...), written into the statement's text when it is executed.

    A hundred placeholders would cost more than everything else a statement costs this side of the network.
    """

    cache_ok = True

    def literal_processor(self, dialect: Any) -> Callable[[Sequence[int]], str]:
        return lambda numbers: f"({', '.join(str(int(number)) for number in numbers) or 'NULL'})"


@dataclass(frozen=True)
class ServerFacts:
    """What check wants to know of a server."""

    read_only: bool = False
    max_connections: int | None = None
    #: Why rows cannot be claimed under READ COMMITTED, if so.
    isolation_trouble: str | None = None
    knows_skip_locked: bool = True


@dataclass(frozen=True)
class StorageFacts:
    """What check wants to know of how a table is stored."""

    #: Why the table cannot be claimed safely, if so.
    trouble: str | None = None
    #: The statement that mends it.
    remedy: str | None = None
    #: About how many rows it has; None when not known.
    rows: int | None = None


@dataclass(frozen=True)
class Plan:
    """How the server would run a statement."""

    #: The index it walks, None for a scan of the whole table.
    index: str | None
    sorts: bool = False


class epoch_seconds(FunctionElement[int]):
    """The database's clock: whole seconds since 1970, rounded down, evaluated when the statement starts.

    Rounded down both when stored and when compared, with a strict `<`, a lease never ends early and at most one
    second late.
    """

    type = BigInteger()
    inherit_cache = True
    name = "epoch_seconds"


class epoch_milliseconds(FunctionElement[int]):
    """The database's clock: whole milliseconds since 1970, evaluated when the statement starts.

    All times in celery_claim's own tables are of this kind.
    """

    type = BigInteger()
    inherit_cache = True
    name = "epoch_milliseconds"


class Dialect:
    """One kind of database; the subclasses say how it differs."""

    #: UPDATE ... RETURNING exists, and one statement can claim without a race.
    claims_in_one_statement = False
    #: Rows locked by somebody else can be passed over in a SELECT.
    skips_locked = False
    #: A transaction of one writer keeps every other writer out.
    one_writer = False
    #: Candidates come from an index that holds only the pending rows, where there is one.
    partial_indexes = False

    def __init__(self, name: str) -> None:
        self.name = name

    def connect_args(self, url: URL) -> dict[str, Any]:
        """Time limits for the driver, unless the URL has its own."""
        return {}

    def session_setup(self, connection: Any) -> None:
        """What each new connection of ours is set to; `connection` is the driver's own."""

    def lock_wait(self, seconds: int) -> str:
        """The statement that bounds how long the session waits for a lock."""
        raise NotImplementedError

    def begin(self) -> str:
        """The statement that starts a transaction of a transactional handler."""
        return "BEGIN"

    def fault(self, error: BaseException) -> Fault | None:
        """What a driver's exception means; None when it does not come from a database driver."""
        raise NotImplementedError

    def among(self, key: Column[Any], name: str) -> ColumnElement[bool]:
        """That the key is in the list bound as `name`."""
        if isinstance(key.type, Integer):
            return key.op("IN", is_comparison=True)(bindparam(name, type_=NumberList(), literal_execute=True))
        return key.in_(bindparam(name, expanding=True, type_=key.type))

    def by_primary_key(self, statement: Any, table: Any) -> Any:
        """The statement, bound to reach its rows through the primary key."""
        return statement

    def reflected_name(self, name: str) -> str:
        """A column's name, from how SQLAlchemy's reflection spells it."""
        return name

    def collation(self, ask: Ask, table: str, schema: str | None, column: str, reflected: str | None) -> str | None:
        """The collation of a column, as far as it is known."""
        return reflected

    def passing_locked(self, statement: Select[Any]) -> Select[Any]:
        return statement.with_for_update(skip_locked=True) if self.skips_locked else statement

    # ---- what check wants to know; `ask` runs a query and returns its rows

    def server(self, ask: Ask) -> ServerFacts:
        """The server as far as claims depend on it."""
        raise NotImplementedError

    def storage(self, ask: Ask, table: str, schema: str | None) -> StorageFacts:
        """How a table is stored."""
        return StorageFacts()

    def plan(self, ask_plan: Ask, statement: str) -> Plan | None:
        """How the server would run a statement; None where the answer says nothing about a large table."""
        return None

    def exact_text(self, column: str, length: int) -> str:
        """The clause of ALTER TABLE that makes a column hold so many characters, compared byte by byte."""
        return f"ALTER COLUMN {column} TYPE CHAR({length})"
