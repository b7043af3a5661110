"""SQLite."""

from __future__ import annotations

import re
import sqlite3
import time
from typing import Any

from sqlalchemy.ext.compiler import compiles

from celery_claim.backoff import full_jitter
from celery_claim.dialects.dialect import Ask, Dialect, Fault, Plan, ServerFacts, epoch_milliseconds, epoch_seconds


@compiles(epoch_seconds, "sqlite")
def _sqlite_clock(element: Any, compiler: Any, **options: Any) -> str:
    return "CAST(strftime('%s', 'now') AS INTEGER)"


@compiles(epoch_milliseconds, "sqlite")
def _sqlite_precise_clock(element: Any, compiler: Any, **options: Any) -> str:
    # Whole numbers all the way: '%f' is SS.SSS, and what follows its point are the milliseconds.
    return "(CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER))"


#: How often to ask for write-ahead logging before doing without: slower, and as safe.
WAL_TRIES = 30


def _journal_mode(connection: Any, mode: str | None = None) -> str:
    """The journal mode of the file, after changing it to `mode` if given."""
    cursor = connection.cursor()
    try:
        cursor.execute("PRAGMA journal_mode" + (f" = {mode}" if mode else ""))
        return str(cursor.fetchone()[0])
    finally:
        cursor.close()


class SQLite(Dialect):
    """SQLite 3.35 and later, in a file."""

    claims_in_one_statement = True
    one_writer = True
    partial_indexes = True

    def session_setup(self, connection: Any) -> None:
        # In this mode readers do not wait for the writer; it stays with the file. The change needs the file alone and
        # does not wait for it, so of processes that start at once all but one are refused at first.
        for attempt in range(WAL_TRIES):
            try:
                if _journal_mode(connection) == "wal" or _journal_mode(connection, "WAL") == "wal":
                    return
            except sqlite3.OperationalError as error:
                if self.fault(error) is not Fault.CONTENTION:
                    raise
            time.sleep(full_jitter(attempt))

    def lock_wait(self, seconds: int) -> str:
        return f"PRAGMA busy_timeout = {seconds * 1000:d}"

    def begin(self) -> str:
        # A deferred BEGIN takes the write lock at its first write, and fails at once, without waiting, when
        # somebody wrote after its first read (https://www.sqlite.org/rescode.html#busy_snapshot).
        return "BEGIN IMMEDIATE"

    def fault(self, error: BaseException) -> Fault | None:
        if type(error).__module__.partition(".")[0] not in ("sqlite3", "_sqlite3"):
            return None
        text = str(error)
        if "locked" in text:
            return Fault.CONTENTION
        if "readonly" in text:
            return Fault.READ_ONLY
        if "unable to open" in text or "disk I/O error" in text or "is full" in text:
            return Fault.UNAVAILABLE
        if type(error).__name__ in ("DataError", "IntegrityError") or "binding parameter" in text:
            return Fault.DATA
        return Fault.REFUSED

    def server(self, ask: Ask) -> ServerFacts:
        trouble = None
        if sqlite3.sqlite_version_info < (3, 35):
            trouble = f"SQLite {sqlite3.sqlite_version} has no UPDATE ... RETURNING; 3.35 or later is needed"
        return ServerFacts(isolation_trouble=trouble, knows_skip_locked=False)

    def plan(self, ask_plan: Ask, statement: str) -> Plan | None:
        details = " / ".join(str(row[-1]) for row in ask_plan(f"EXPLAIN QUERY PLAN {statement}"))
        index = re.search(r"USING (?:COVERING )?(?:INDEX (\w+)|INTEGER PRIMARY KEY)", details)
        return Plan(index=(index[1] or "primary key") if index else None, sorts="TEMP B-TREE" in details)
