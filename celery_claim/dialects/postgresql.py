"""PostgreSQL."""

from __future__ import annotations

import json
import re
from typing import Any

from sqlalchemy import ARRAY, URL, Column, ColumnElement, any_, bindparam
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


@compiles(epoch_seconds, "postgresql")
def _postgresql_clock(element: Any, compiler: Any, **options: Any) -> str:
    # Not now(): that is the start of the transaction, minutes ago in a transactional handler. Not clock_timestamp():
    # it is volatile, so no index could serve a comparison with it, and looking for due retries would read all of them.
    return "CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp())) AS BIGINT)"


@compiles(epoch_milliseconds, "postgresql")
def _postgresql_precise_clock(element: Any, compiler: Any, **options: Any) -> str:
    return "CAST(FLOOR(EXTRACT(EPOCH FROM statement_timestamp()) * 1000) AS BIGINT)"


class PostgreSQL(Dialect):
    """PostgreSQL 13 and later."""

    claims_in_one_statement = True
    skips_locked = True
    partial_indexes = True

    #: https://www.postgresql.org/docs/current/errcodes-appendix.html: serialization failure, deadlock, lock not
    #: available, query canceled.
    CONTENTION = frozenset({"40001", "40P01", "55P03", "57014"})
    READ_ONLY = frozenset({"25006"})
    #: Too many connections, cannot connect now.
    UNAVAILABLE = frozenset({"53300", "57P03"})
    #: Wrong user or password, unknown database.
    DENIED = frozenset({"28000", "28P01", "3D000"})

    def connect_args(self, url: URL) -> dict[str, Any]:
        if url.get_driver_name() not in ("psycopg", "psycopg2"):
            return {}
        limits = {"connect_timeout": CONNECT_SECONDS, "tcp_user_timeout": SILENCE_SECONDS * 1000}
        return {name: limit for name, limit in limits.items() if name not in url.query}

    def among(self, key: Column[Any], name: str) -> ColumnElement[bool]:
        # One parameter, so that the driver can keep the statement prepared whatever the length of the list.
        return key == any_(bindparam(name, type_=ARRAY(key.type)))

    def lock_wait(self, seconds: int) -> str:
        return f"SET lock_timeout = {seconds * 1000:d}"

    def fault(self, error: BaseException) -> Fault | None:
        if type(error).__module__.partition(".")[0] not in ("psycopg", "psycopg2"):
            return None
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if state is None:
            # No answer from a server at all. psycopg gives its own refusals (a NUL in a text) without a state too.
            name = type(error).__name__
            if name in ("DataError", "IntegrityError"):
                return Fault.DATA
            # libpq reports a failed log-in without its code.
            if re.search(r"authentication failed|does not exist|no pg_hba.conf entry", str(error)):
                return Fault.DENIED
            if re.search(r"connection failed|could not connect|timeout expired", str(error)):
                return Fault.UNAVAILABLE
            return Fault.LOST if name in ("OperationalError", "InterfaceError", "DatabaseError") else Fault.REFUSED
        if state in self.CONTENTION:
            return Fault.CONTENTION
        if state in self.READ_ONLY:
            return Fault.READ_ONLY
        if state in self.UNAVAILABLE:
            return Fault.UNAVAILABLE
        if state in self.DENIED:
            return Fault.DENIED
        if state[:2] in ("08", "57"):
            return Fault.LOST
        return Fault.DATA if state[:2] in ("22", "23") else Fault.REFUSED

    def server(self, ask: Ask) -> ServerFacts:
        recovering, read_only, connections = ask(
            "SELECT pg_is_in_recovery(), current_setting('transaction_read_only'), current_setting('max_connections')"
        )[0]
        return ServerFacts(read_only=recovering or read_only == "on", max_connections=int(connections))

    def storage(self, ask: Ask, table: str, schema: str | None) -> StorageFacts:
        rows = ask(
            "SELECT c.reltuples FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE c.relname = :table AND n.nspname = COALESCE(CAST(:schema AS text), current_schema())",
            table=table,
            schema=schema,
        )
        return StorageFacts(rows=int(rows[0][0]) if rows else None)

    def plan(self, ask_plan: Ask, statement: str) -> Plan | None:
        found = ask_plan(f"EXPLAIN (FORMAT JSON) {statement}")[0][0]
        nodes = list(_nodes((json.loads(found) if isinstance(found, str) else found)[0]["Plan"]))
        scans = [node for node in nodes if "Scan" in node["Node Type"]]
        index = next((node["Index Name"] for node in scans if "Index Name" in node), None)
        return Plan(index=index, sorts=any(node["Node Type"] == "Sort" for node in nodes))


def _nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node, *(below for child in node.get("Plans", []) for below in _nodes(child))]
