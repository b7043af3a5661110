"""MySQL and MariaDB."""

from __future__ import annotations

from typing import Any

from sqlalchemy import URL, Select, Update
from sqlalchemy.ext.compiler import compiles

from celery_claim.dialects.dialect import (
    CONNECT_SECONDS,
    SILENCE_SECONDS,
    Ask,
    Dialect,
    Fault,
    Plan,
    ServerFacts,
    StorageFacts,
    epoch_milliseconds,
    epoch_seconds,
)


@compiles(epoch_seconds, "mysql")
@compiles(epoch_seconds, "mariadb")
def _mysql_clock(element: Any, compiler: Any, **options: Any) -> str:
    # Independent of the session's time zone, unlike UNIX_TIMESTAMP(NOW()) around a change of daylight saving time.
    return "UNIX_TIMESTAMP()"


@compiles(epoch_milliseconds, "mysql")
@compiles(epoch_milliseconds, "mariadb")
def _mysql_precise_clock(element: Any, compiler: Any, **options: Any) -> str:
    # UNIX_TIMESTAMP(NOW(3)) would go through local time, which repeats an hour each autumn.
    return "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000"


class MySQL(Dialect):
    """MySQL 5.6 and later, MariaDB."""

    #: https://dev.mysql.com/doc/mysql-errors/8.0/en/server-error-reference.html and client-error-reference.html
    LOCK_WAIT_TIMEOUT, DEADLOCK, CHECKREAD, QUERY_INTERRUPTED = 1205, 1213, 1020, 1317
    OPTION_PREVENTS_STATEMENT, READ_ONLY_MODE, READ_ONLY_TRANSACTION = 1290, 1836, 1792
    CONTENTION = frozenset({LOCK_WAIT_TIMEOUT, DEADLOCK, CHECKREAD, QUERY_INTERRUPTED})
    READ_ONLY = frozenset({OPTION_PREVENTS_STATEMENT, READ_ONLY_MODE, READ_ONLY_TRANSACTION})
    #: 1053 shutdown, 1927 connection killed, 2006 gone away, 2013 lost during query, 2055 lost at, 4031 idle too long,
    #: 1047 Galera node not ready, 1184 aborted connection.
    LOST = frozenset({1047, 1053, 1184, 1927, 2006, 2013, 2055, 4031, 0})
    #: 1040 too many connections, 1129 host blocked, 1203, 1226 limits of a user, 2002, 2003, 2005 cannot connect.
    UNAVAILABLE = frozenset({1040, 1129, 1203, 1226, 2002, 2003, 2005})
    #: 1044, 1045, 1130, 1698 access denied, 1049 unknown database.
    DENIED = frozenset({1044, 1045, 1049, 1130, 1698})
    #: 1048 null, 1062 duplicate, 1264 range, 1265 truncated, 1292, 1366 wrong value, 1406 too long,
    #: 1451, 1452 foreign key, 3819, 4025 check constraint.
    DATA = frozenset({1048, 1062, 1264, 1265, 1292, 1366, 1406, 1451, 1452, 3819, 4025})

    def connect_args(self, url: URL) -> dict[str, Any]:
        if url.get_driver_name() not in ("mysqldb", "pymysql"):
            return {}
        limits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": SILENCE_SECONDS, "write_timeout": SILENCE_SECONDS}
        return {name: limit for name, limit in limits.items() if name not in url.query}

    def session_setup(self, connection: Any) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute("SELECT @@log_bin, @@binlog_format")
            logs, log_format = cursor.fetchone()
            # Under REPEATABLE READ an UPDATE keeps gap locks that block inserters. A statement-based binary log
            # refuses READ COMMITTED (error 1665), so there the server's own level has to do.
            if not (logs and str(log_format).upper() == "STATEMENT"):
                cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        finally:
            cursor.close()

    def lock_wait(self, seconds: int) -> str:
        return f"SET SESSION innodb_lock_wait_timeout = {seconds:d}"

    def fault(self, error: BaseException) -> Fault | None:
        if type(error).__module__.partition(".")[0] not in ("MySQLdb", "pymysql", "mysql", "mariadb"):
            return None
        number = error.args[0] if error.args and isinstance(error.args[0], int) else getattr(error, "errno", None)
        for numbers, fault in (
            (self.CONTENTION, Fault.CONTENTION),
            (self.READ_ONLY, Fault.READ_ONLY),
            (self.LOST, Fault.LOST),
            (self.UNAVAILABLE, Fault.UNAVAILABLE),
            (self.DENIED, Fault.DENIED),
            (self.DATA, Fault.DATA),
        ):
            if number in numbers:
                return fault
        if type(error).__name__ in ("DataError", "IntegrityError"):
            return Fault.DATA
        return Fault.LOST if type(error).__name__ == "InterfaceError" else Fault.REFUSED

    def by_primary_key(self, statement: Any, table: Any) -> Any:
        # Below 200 ids MariaDB would walk (status, id), above it the primary key: two routes to the same rows are
        # a deadlock. A dialect's name may be either for the same server, so both get the hint.
        if isinstance(statement, Update):
            for name in ("mysql", "mariadb"):
                statement = statement.with_hint("FORCE INDEX (PRIMARY)", dialect_name=name)
        elif isinstance(statement, Select):
            for name in ("mysql", "mariadb"):
                statement = statement.with_hint(table, "FORCE INDEX (PRIMARY)", dialect_name=name)
        return statement

    def reflected_name(self, name: str) -> str:
        # It is read from SHOW CREATE TABLE, and a backtick of the name stays doubled as it is there.
        return name.replace("``", "`")

    def collation(self, ask: Ask, table: str, schema: str | None, column: str, reflected: str | None) -> str | None:
        # Reflection knows only what SHOW CREATE TABLE prints, and that leaves out the table's own collation.
        rows = ask(
            "SELECT collation_name FROM information_schema.columns WHERE table_name = :table "
            "AND table_schema = COALESCE(:schema, DATABASE()) AND column_name = :column",
            table=table,
            schema=schema,
            column=column,
        )
        return rows[0][0] if rows else None

    def server(self, ask: Ask) -> ServerFacts:
        version, read_only, connections, logs, log_format = ask(
            "SELECT @@version, @@read_only, @@max_connections, @@log_bin, @@binlog_format"
        )[0]
        statement_log = bool(logs) and str(log_format).upper() == "STATEMENT"
        return ServerFacts(
            read_only=bool(int(read_only)),
            max_connections=int(connections),
            isolation_trouble=(
                "the binary log is statement-based and refuses READ COMMITTED: claims run under the server's own "
                "isolation level and may block inserters; set binlog_format=ROW"
            )
            if statement_log
            else None,
            knows_skip_locked=_version(version) >= ((10, 6) if "mariadb" in version.lower() else (8, 0, 1)),
        )

    def storage(self, ask: Ask, table: str, schema: str | None) -> StorageFacts:
        rows = ask(
            "SELECT engine, table_rows FROM information_schema.tables "
            "WHERE table_name = :table AND table_schema = COALESCE(:schema, DATABASE())",
            table=table,
            schema=schema,
        )
        engine, count = rows[0] if rows else (None, None)
        trouble = remedy = None
        if engine and engine.lower() != "innodb":
            trouble = f"its engine is {engine}: without transactions and row locks a claim can be half done"
            remedy = "ALTER TABLE {table} ENGINE = InnoDB"
        return StorageFacts(trouble, remedy, None if count is None else int(count))

    def exact_text(self, column: str, length: int) -> str:
        return f"MODIFY {column} CHAR({length}) CHARACTER SET ascii COLLATE ascii_bin NULL"

    def plan(self, ask_plan: Ask, statement: str) -> Plan | None:
        row = ask_plan(f"EXPLAIN {statement}")[0]._mapping
        if row["table"] is None:  # "Impossible WHERE": there is no row of the sample's key, and so no plan
            return None
        return Plan(index=row["key"], sorts="filesort" in (row["Extra"] or ""))


def _version(text: str) -> tuple[int, ...]:
    numbers = text.split("-")[0].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())
