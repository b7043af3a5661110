"""One engine per process, and connections that survive the server's troubles.

Every statement of ours is a transaction of its own (AUTOCOMMIT, READ COMMITTED): no snapshot is kept between two
statements and no row lock outlives one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from sqlalchemy import (
    URL,
    Connection,
    CursorResult,
    Engine,
    Executable,
    Update,
    create_engine,
    event,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql.visitors import cloned_traverse

from celery_claim.backoff import full_jitter
from celery_claim.dialects import LOCK_WAIT_SECONDS, Dialect, Fault, dialect_of, epoch_seconds, fault_of
from celery_claim.dialects.prepared import Prepared
from celery_claim.exceptions import (
    AccessDenied,
    ClaimError,
    ConfigurationError,
    Contention,
    DatabaseUnavailable,
    ReadOnly,
    StatementRefused,
    ValueRefused,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ERRORS: Mapping[Fault, type[Exception]] = {
    Fault.LOST: DatabaseUnavailable,
    Fault.READ_ONLY: ReadOnly,
    Fault.UNAVAILABLE: DatabaseUnavailable,
    Fault.DENIED: AccessDenied,
    Fault.CONTENTION: Contention,
    Fault.DATA: ValueRefused,
    Fault.REFUSED: StatementRefused,
}

#: Engines and connections that a forked child inherited. They are kept alive and untouched: closing one, or letting
#: the garbage collector do it, would say goodbye to the server on the parent's socket.
_inherited: list[object] = []
_databases: weakref.WeakSet[Database] = weakref.WeakSet()
#: Where a connection carries how long it waits for locks.
_LOCK_WAIT = "celery_claim_lock_wait"


class Database:
    """The engine of one database, made at first use in each process."""

    def __init__(self, url: str | URL, *, engine_options: Mapping[str, Any] | None = None) -> None:
        """Raises ConfigurationError for a URL or a database that cannot work; the password is never shown."""
        self.url = _parsed(url)
        self.dialect: Dialect = dialect_of(self.url.get_backend_name())
        self._options = dict(engine_options or {})
        self._pool_source: Engine | None = None
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._session_engine: Engine | None = None
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._prepared: dict[Executable, Prepared | None] = {}
        _databases.add(self)

    @classmethod
    def of(cls, engine: Engine) -> Database:
        """The database of a user's engine, with a pool of its own made as the user's one is.

        Not the user's pool: its connections keep their isolation level, and after a fork its sockets are the
        parent's.
        """
        database = cls(engine.url)
        database._pool_source = engine
        return database

    @property
    def name(self) -> str:
        """The URL without the password."""
        return self.url.set(query={}).render_as_string(hide_password=True)

    @property
    def engine(self) -> Engine:
        """The engine of this process; every connection is in autocommit mode."""
        with self._lock:
            if self._engine is None:
                self._engine = self._make_engine(limited=True)
            return self._engine

    @property
    def session_engine(self) -> Engine:
        """An engine for transactional handlers, whose own statements may be as slow as they like."""
        with self._lock:
            if self._session_engine is None:
                self._session_engine = self._make_engine(limited=False)
            return self._session_engine

    def prepared(self, statement: Executable) -> Prepared | None:
        """The statement compiled for this database, or None where SQLAlchemy has to render it each time."""
        try:
            return self._prepared[statement]
        except KeyError:
            dialect = self.engine.dialect
            made = Prepared(statement, dialect) if Prepared.suits(statement, dialect) else None
            return self._prepared.setdefault(statement, made)

    def link(self, *, lock_wait_seconds: int = LOCK_WAIT_SECONDS) -> Link:
        link = Link(self, lock_wait_seconds)
        self._links.add(link)
        return link

    @contextmanager
    def linked(self, *, lock_wait_seconds: int = LOCK_WAIT_SECONDS) -> Iterator[Link]:
        """A link for the length of a block."""
        link = self.link(lock_wait_seconds=lock_wait_seconds)
        try:
            yield link
        finally:
            link.close()

    def dispose(self) -> None:
        """Close the connections that no one uses."""
        with self._lock:
            engines, self._engine, self._session_engine = (self._engine, self._session_engine), None, None
        for engine in engines:
            if engine is not None:
                engine.dispose()

    def forget(self) -> list[object]:
        """In a forked child: start anew without touching what is the parent's, which is returned."""
        inherited: list[object] = [self._engine, self._session_engine]
        inherited += [link.forget() for link in list(self._links)]
        self._lock = threading.Lock()
        self._engine = self._session_engine = None
        self._links = weakref.WeakSet()
        return inherited

    def _make_engine(self, *, limited: bool) -> Engine:
        options: dict[str, Any] = {
            "pool_pre_ping": True,
            "pool_recycle": 3600,
            # As many connections as there are consumers in the process: a bound would only make them wait.
            # Not every pool has a bound, and a user's own is the user's to configure.
            **({} if {"pool", "poolclass"} & self._options.keys() else {"max_overflow": -1}),
            **self._options,
            "isolation_level": "AUTOCOMMIT",
        }
        if self._pool_source is not None:
            options = {"pool": self._pool_source.pool.recreate(), "isolation_level": "AUTOCOMMIT"}
        elif limited:
            options["connect_args"] = {**self.dialect.connect_args(self.url), **options.get("connect_args", {})}
        try:
            engine = create_engine(self.url, **options)
        except NoSuchModuleError:
            raise ConfigurationError(f"no SQLAlchemy dialect for {self.name}: is its driver installed?") from None
        except (ArgumentError, TypeError) as error:
            raise ConfigurationError(f"claim_database_engine_options do not work for {self.name}: {error}") from None
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"the driver of {self.name} is not installed ({error}); pip install 'celery-claim[mysql]' or "
                "'celery-claim[postgresql]', or name another driver in the URL"
            ) from None
        event.listen(engine, "connect", lambda connection, record: self.dialect.session_setup(connection))
        return engine


class Link:
    """One connection, opened when it is needed and opened again after a fault."""

    def __init__(self, database: Database, lock_wait_seconds: int) -> None:
        self.database = database
        self.dialect = database.dialect
        self._lock_wait_seconds = lock_wait_seconds
        self._connection: Connection | None = None

    def execute(self, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
        """Run one statement as a transaction of its own.

        Raises DatabaseUnavailable (and the statement may have been done), Contention (it was rolled back),
        ValueRefused or StatementRefused; each with the server's own words and without the statement's values.
        """
        with self.translating():
            return run(self.connection, statement, parameters)

    def send(self, statement: Executable, parameters: Mapping[str, Any]) -> CursorResult[Any]:
        """`execute` for a statement object that is kept and sent again and again."""
        with self.translating():
            # Connected first: only then does SQLAlchemy know what the server can, native UUIDs for one.
            connection = self.connection
            prepared = self.database.prepared(statement)
            if prepared is None:
                return run(connection, statement, parameters)
            return prepared.execute(connection, parameters)

    def ask(self, query: str, **parameters: Any) -> Sequence[Any]:
        """The rows of a query in the database's own words."""
        return self.execute(text(query), parameters).all()

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Turns the errors of SQLAlchemy and the driver in a block into ours; see `execute`."""
        try:
            with translated(self.database):
                yield
        except DatabaseUnavailable:
            self.drop()
            raise
        except ClaimError:
            raise
        except BaseException:
            # A signal in the middle of a statement (a time limit, a shutdown) may leave an answer unread on the wire.
            self.drop()
            raise

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One short transaction; rolled back when the block raises."""
        self.execute(text(self.dialect.begin()))
        try:
            yield
        except BaseException:
            try:
                self.execute(text("ROLLBACK"))
            except ClaimError:  # whatever the server kept of the transaction ends with the connection
                self.drop()
            raise
        self.execute(text("COMMIT"))

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            connection = self.database.engine.connect()
            # What a connection of the pool was set to stays with it, so short links need not say it again.
            if connection.info.get(_LOCK_WAIT) != self._lock_wait_seconds:
                connection.execute(text(self.dialect.lock_wait(self._lock_wait_seconds)))
                connection.info[_LOCK_WAIT] = self._lock_wait_seconds
            self._connection = connection
        return self._connection

    def close(self) -> None:
        """Give the connection back; the link opens another when it is used again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(DBAPIError):  # it is gone already
                connection.close()

    def forget(self) -> Connection | None:
        """In a forked child: let go of the parent's connection, which is returned."""
        connection, self._connection = self._connection, None
        return connection

    def drop(self) -> None:
        """Throw the connection away: what the server last said on it is not known, or it is the wrong server."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(DBAPIError):
                connection.invalidate()
                connection.close()


def run(connection: Connection, statement: Executable, parameters: Any = None) -> CursorResult[Any]:
    """Execute a statement whose parameters may be called like columns of its table."""
    if isinstance(statement, Update) and parameters and not parameters.keys().isdisjoint(statement.table.c.keys()):
        # SQLAlchemy would take such a parameter for a value to assign to that column. Inside the statement it is safe.
        statement, parameters = _holding(statement, parameters), None
    return connection.execute(statement, parameters)


def _holding(statement: Update, parameters: Mapping[str, Any]) -> Update:
    """A copy of the statement with the values of its parameters in it."""

    def hold(parameter: Any) -> None:
        if parameter.key in parameters:
            parameter.value, parameter.required = parameters[parameter.key], False

    return cloned_traverse(statement, {"maintain_key": True}, {"bindparam": hold})


@contextmanager
def translated(database: Database, *, quietly: bool = False) -> Iterator[None]:
    """Turns the errors of SQLAlchemy and the driver in a block into ours; `quietly` swallows a lost connection."""
    try:
        yield
    except PoolTimeout as error:
        raise DatabaseUnavailable(f"{database.name}: {error}") from error
    except StatementError as error:
        fault = (fault_of(error) or Fault.REFUSED) if isinstance(error, DBAPIError) else Fault.DATA
        if quietly and fault is Fault.LOST:
            return
        # The driver's own words: SQLAlchemy's hold the statement with the values of the row.
        raise _ERRORS[fault](f"{database.name}: {error.orig}") from error
    except Exception as error:
        # SQLAlchemy hands on the driver's own error where it changes the settings of a connection.
        driver_fault = fault_of(error)
        if driver_fault is None:
            raise
        if quietly and driver_fault is Fault.LOST:
            return
        raise _ERRORS[driver_fault](f"{database.name}: {error}") from error


def server_time(link: Link) -> int:
    """Whole seconds since 1970 by the database's clock."""
    return int(link.execute(select(epoch_seconds())).scalar_one())


def persistently(operation: Callable[[], T], *, until: float, stopping: Callable[[], bool] = lambda: False) -> T:
    """The result of an operation that may be repeated, tried through deadlocks and lost connections.

    `until` is a time.monotonic() value: later, the last error is raised. Between tries it waits a few milliseconds
    after a deadlock or lock wait, up to a second or so while the database is away.
    """
    attempt = 0
    while True:
        try:
            return operation()
        except (Contention, DatabaseUnavailable) as error:
            away = isinstance(error, DatabaseUnavailable)
            # The first try after a lost connection follows at once: most often an idle connection was closed.
            pause = 0.0 if away and attempt == 0 else full_jitter(attempt, cap=1.5 if away else 0.2)
            if time.monotonic() + pause >= until or stopping():
                raise
            logger.warning("database trouble, trying again: %s", error) if attempt == 1 else logger.info(
                "database trouble, trying again: %s", error
            )
            time.sleep(pause)
            attempt += 1


def _parsed(url: str | URL) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigurationError(
            "claim_database_url is not a SQLAlchemy URL (its value is not shown, it may hold a password); "
            "expected for example mysql+mysqldb://user:password@host/name"
        ) from None
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise ConfigurationError(
            "an SQLite database in memory is another one for each thread and process; use a file, for example "
            "sqlite:////var/lib/proj/proj.db"
        )
    return parsed


def _forget_engines() -> None:
    for database in list(_databases):
        _inherited.extend(database.forget())


os.register_at_fork(after_in_child=_forget_engines)
