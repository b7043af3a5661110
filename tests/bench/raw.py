"""The bare claim loop, with the driver alone: what the database and the machine allow."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from sqlalchemy.engine import make_url

from . import model
from .crew import Seat

LEASE_SECONDS = 600
COLUMNS = ", ".join(model.COLUMNS)

Loop = Callable[[], dict[str, Any]]


def prepare(seat: Seat, url: str, table: str, batch: int, done: str, offsets: bool) -> Loop:
    """A loop that drains `table`: claim `batch` rows, call a function for each, write back, until none is left.

    `done` is "row" (one statement a row) or "batch" (one a batch). With `offsets` each consumer looks
    for candidates at its own distance from the head, as a window's runs do; without, all of them at the head.
    """
    connected = connect(url, table, seat)
    step = seat.ordinal * batch if offsets else 0
    _, token, rows = connected.claim(1, 0)
    while not rows:  # others warm up at the same time
        _, token, rows = connected.claim(1, 0)
    connected.write_back_batch(rows, token)

    def drain() -> dict[str, Any]:
        handled = candidates = claims = lost = 0
        behind = step
        while True:
            claims += 1
            if claims % seat.consumers == 0:
                behind = 0  # whoever owns the head may be gone: each consumer looks there now and then
            seen, token, rows = connected.claim(batch, behind)
            candidates += seen
            lost += seen - len(rows)
            if not seen:
                if not behind:
                    return {"handled": handled, "candidates": candidates, "lost": lost, "claims": claims}
                behind = 0
                continue
            behind = step
            for row in rows:
                no_operation(row)
                if done == "row":
                    connected.write_back_row(row, token)
            if rows and done == "batch":
                connected.write_back_batch(rows, token)
            handled += len(rows)

    return drain


def connect(url: str, table: str, seat: Seat) -> MariaDB | PostgreSQL:
    kind = PostgreSQL if make_url(url).get_backend_name() == "postgresql" else MariaDB
    return kind(url, table, seat)


def no_operation(row: object) -> None:
    """The handler of every loop measured here."""


class MariaDB:
    """Candidates, claim, winners: three statements, each by the primary key but the first (mysqlclient)."""

    def __init__(self, url: str, table: str, seat: Seat) -> None:
        import MySQLdb

        parts = make_url(url)
        self.connection = MySQLdb.connect(
            host=parts.host,
            port=parts.port or 3306,
            user=parts.username,
            password=parts.password or "",
            database=parts.database,
            autocommit=True,
        )
        self.cursor = self.connection.cursor()
        self.cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self.table = table
        self.worker_id = f"raw-c{seat.ordinal}"

    def claim(self, batch: int, behind: int) -> tuple[int, str, list[tuple[Any, ...]]]:
        """How many candidates there were, the token, and the rows won."""
        execute, table = self.cursor.execute, self.table
        execute(f"SELECT id FROM {table} WHERE status = 0 ORDER BY id LIMIT {batch} OFFSET {behind}")
        ids = [row[0] for row in self.cursor.fetchall()]
        if not ids:
            return 0, "", []
        token, marks = uuid.uuid4().hex, _marks(ids)
        won = execute(
            f"UPDATE {table} FORCE INDEX (PRIMARY) SET status = 1, claim_token = %s, claim_time = UNIX_TIMESTAMP(),"
            f" lease_seconds = {LEASE_SECONDS}, worker_id = %s WHERE id IN ({marks}) AND status = 0",
            (token, self.worker_id, *ids),
        )
        if not won:
            return len(ids), token, []
        execute(
            f"SELECT {COLUMNS} FROM {table} FORCE INDEX (PRIMARY) WHERE id IN ({marks}) AND claim_token = %s",
            (*ids, token),
        )
        return len(ids), token, list(self.cursor.fetchall())

    def write_back_row(self, row: tuple[Any, ...], token: str) -> None:
        self.cursor.execute(
            f"UPDATE {self.table} FORCE INDEX (PRIMARY) SET status = 2"
            " WHERE id = %s AND status = 1 AND claim_token = %s",
            (row[0], token),
        )

    def write_back_batch(self, rows: list[tuple[Any, ...]], token: str) -> None:
        ids = [row[0] for row in rows]
        self.cursor.execute(
            f"UPDATE {self.table} FORCE INDEX (PRIMARY) SET status = 2"
            f" WHERE id IN ({_marks(ids)}) AND status = 1 AND claim_token = %s",
            (*ids, token),
        )


class PostgreSQL:
    """One statement with SKIP LOCKED and RETURNING (psycopg); a candidate is never lost."""

    def __init__(self, url: str, table: str, seat: Seat) -> None:
        import psycopg

        plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self.connection = psycopg.connect(plain, autocommit=True)
        self.cursor = self.connection.cursor()
        self.table = table
        self.worker_id = f"raw-c{seat.ordinal}"

    def claim(self, batch: int, behind: int) -> tuple[int, str, list[tuple[Any, ...]]]:
        """How many candidates there were, the token, and the rows won."""
        token = uuid.uuid4().hex
        self.cursor.execute(
            f"UPDATE {self.table} SET status = 1, claim_token = %s,"
            " claim_time = floor(extract(epoch FROM clock_timestamp()))::bigint,"
            f" lease_seconds = {LEASE_SECONDS}, worker_id = %s WHERE id = ANY(ARRAY("
            f"SELECT id FROM {self.table} WHERE status = 0 ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED))"
            f" AND status = 0 RETURNING {COLUMNS}",
            (token, self.worker_id, batch),
        )
        rows = self.cursor.fetchall()
        return len(rows), token, rows

    def write_back_row(self, row: tuple[Any, ...], token: str) -> None:
        self.cursor.execute(
            f"UPDATE {self.table} SET status = 2 WHERE id = %s AND status = 1 AND claim_token = %s", (row[0], token)
        )

    def write_back_batch(self, rows: list[tuple[Any, ...]], token: str) -> None:
        self.cursor.execute(
            f"UPDATE {self.table} SET status = 2 WHERE id = ANY(%s) AND status = 1 AND claim_token = %s",
            ([row[0] for row in rows], token),
        )


def _marks(ids: list[Any]) -> str:
    return ",".join(["%s"] * len(ids))
