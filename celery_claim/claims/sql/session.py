"""A transaction in which a handler's own writes and the write back of its row are one."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from celery_claim.claims.sql.statements import Statements
from celery_claim.database import Database, run, translated


class OwnTransaction:
    """One transaction on a connection of its own, READ COMMITTED; rolled back unless `commit` is called.

    The handler's `session.commit()` flushes and no more: only `commit` here ends the transaction.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> OwnTransaction:
        dialect = self._database.dialect
        with translated(self._database):
            connection = self._database.session_engine.connect()
            self._connection = connection
            try:
                if not dialect.one_writer:
                    connection = connection.execution_options(isolation_level="READ COMMITTED")
                self._transaction = connection.begin()
                if dialect.one_writer:
                    connection.execute(text(dialect.begin()))
            except BaseException:
                connection.invalidate()
                connection.close()
                raise
        self.session = Session(bind=connection, join_transaction_mode="rollback_only", expire_on_commit=False)
        return self

    @property
    def is_active(self) -> bool:
        return self._transaction.is_active

    def succeed(self, statements: Statements, token: str, key: Any, values: dict[str, Any]) -> bool:
        """Mark the row as succeeded inside the transaction; False when it is not ours any more."""
        names = tuple(sorted(values))
        statement = statements.succeed_with(names) if names else statements.succeed
        bound = {f"value_{i}": values[name] for i, name in enumerate(names)}
        with translated(self._database):
            result = run(self._connection, statement, {**bound, "keys": [key], "token": token})
            return bool(result.all()) if result.returns_rows else result.rowcount == 1

    def commit(self) -> None:
        """Raises DatabaseUnavailable when the answer was lost: then the commit may have been done."""
        with translated(self._database):
            self._transaction.commit()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Closing rolls back what was not committed; a connection that is gone has rolled back already.
        with translated(self._database, quietly=True):
            self.session.close()
            self._connection.close()
