"""The table that every loop drains: made, filled and counted in bulk, on MariaDB and PostgreSQL."""

from __future__ import annotations

import json

from sqlalchemy import Engine, Table, create_engine, make_url, text
from sqlalchemy.pool import NullPool

ARGUMENTS = json.dumps({"user_id": 12345, "email": "someone@example.com", "tags": ["a", "b", "c"], "amount": 12.5})

#: Rows in one INSERT, so that a million rows need no huge transaction.
CHUNK = 100_000


def engine(url: str) -> Engine:
    """For the benchmark's own statements: no pool, each of them seen at once by everybody."""
    return create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")


def create(url: str, table: Table) -> None:
    """The table, empty and new: what an earlier round left behind (dead rows, statistics) must not slow this one."""
    mine = engine(url)
    table.drop(mine, checkfirst=True)
    table.create(mine)


def drop(url: str, table: Table) -> None:
    table.drop(engine(url), checkfirst=True)


def fill(url: str, table: Table, rows: int, *, status: int = 0, next_retry_time: int | None = None) -> None:
    """`rows` more rows, and fresh statistics for the optimiser."""
    series = "generate_series(1, {})" if on_postgresql(url) else "seq_1_to_{}"
    with engine(url).connect() as connection:
        for start in range(0, rows, CHUNK):
            connection.execute(
                text(
                    f"INSERT INTO {table.name} (name, arguments, status, retry_count, reclaim_count, next_retry_time)"
                    f" SELECT 'noop', :arguments, {status}, 0, 0, :next_retry_time FROM "
                    + series.format(min(CHUNK, rows - start))
                ),
                {"arguments": ARGUMENTS, "next_retry_time": next_retry_time},
            )
    analyze(url, table)


def analyze(url: str, table: Table) -> None:
    with engine(url).connect() as connection:
        # PostgreSQL's visibility map comes from VACUUM; without it the first claims visit the heap for each candidate.
        statement = f"VACUUM ANALYZE {table.name}" if on_postgresql(url) else f"ANALYZE TABLE {table.name}"
        connection.execute(text(statement))


def states(url: str, table: Table) -> dict[int, int]:
    """How many rows there are in each state."""
    with engine(url).connect() as connection:
        found = connection.execute(text(f"SELECT status, COUNT(*) FROM {table.name} GROUP BY status"))
        return {int(status): int(count) for status, count in found}


def on_postgresql(url: str) -> bool:
    return make_url(url).get_backend_name() == "postgresql"
