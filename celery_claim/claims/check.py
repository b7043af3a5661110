"""Look for what would go wrong at 3 a.m.: the table, its indexes, the server, and the options of the task."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from celery_claim.claims.sql.catalogue import TableFacts, table_facts
from celery_claim.claims.sql.columns import TOKEN_LENGTH, ClaimTable
from celery_claim.claims.table import Claims
from celery_claim.database import Link, server_time
from celery_claim.dialects.dialect import ServerFacts
from celery_claim.exceptions import AccessDenied, ConfigurationError, DatabaseUnavailable, StatementRefused
from celery_claim.states import Status

#: Below this many rows a database rightly reads the whole table, and its plan says nothing.
ROWS_THAT_TELL = 10_000
CONNECTIONS_PER_PROCESS = 2
CONNECTIONS_SHARE = 0.8


@dataclass(frozen=True)
class Finding:
    """Something that check found."""

    #: "error": a worker does not start with it; "warning": it costs something.
    level: str
    #: A short name, such as "no-index".
    code: str
    table: str
    #: What is wrong and what it costs.
    message: str
    #: The statement or setting that mends it.
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.table}: {self.message}" + (f". Remedy: {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Task:
    """What check needs to know of a task."""

    name: str
    lease_seconds: int | None
    max_retries: int | None
    max_reclaims: int | None
    transactional: bool
    skip_locked: bool
    #: Names and leases of the other tasks on the same table.
    siblings: dict[str, int | None]
    processes: int
    max_clock_skew: float


def check_claims(claims: Claims, task: Task) -> list[Finding]:
    """What is wrong with a table and the way a task uses it. Raises DatabaseUnavailable when it cannot be asked."""
    with claims.linked() as link:
        facts = table_facts(link, claims.statements)
        if not facts.exists:
            return [_missing_table(claims.table)]
        server = claims.database.dialect.server(link.ask)
        findings = [
            *_of_columns(claims.table, facts),
            *_of_storage(claims.table, facts),
            *_of_server(claims.table, server, task),
            *_of_task(claims, task, server),
        ]
        if any(finding.level == "error" for finding in findings):
            return findings
        return [*findings, *_of_indexes(claims, facts, task), *_of_use(link, claims, facts, task)]


def unavailable(name: str, error: DatabaseUnavailable) -> Finding:
    """The finding that a database cannot be asked: its own fault if it is down, ours if it refuses us."""
    if isinstance(error, AccessDenied):
        return Finding("error", "access-denied", name, str(error), "correct user, password or name in the database URL")
    return Finding("warning", "database-down", name, str(error), "nothing was checked; workers try again by themselves")


def unusable(name: str, error: ConfigurationError) -> Finding:
    """The finding that a table does not fit the task."""
    return Finding("error", "mapping", name, str(error))


def _missing_table(table: ClaimTable) -> Finding:
    return Finding(
        "error",
        "no-table",
        table.name,
        "the table does not exist",
        "celery -A proj claim initdb --models, your migrations, or metadata.create_all()",
    )


def _of_columns(table: ClaimTable, facts: TableFacts) -> Iterator[Finding]:
    for column, ddl in facts.missing.items():
        yield Finding("error", "no-column", table.name, f"column {column} does not exist", ddl)
    if facts.token_length is not None and facts.token_length < TOKEN_LENGTH:
        yield Finding(
            "error",
            "short-token",
            table.name,
            f"{table.columns['claim_token'].name} holds {facts.token_length} characters and a token has "
            f"{TOKEN_LENGTH}: claimed rows could not be found again",
            facts.token_ddl,
        )
    if facts.token_folds_case:
        yield Finding(
            "error",
            "folding-token",
            table.name,
            f"{table.columns['claim_token'].name} has the collation {facts.token_collation}, which does not tell upper "
            "from lower case: tokens must be compared byte by byte",
            facts.token_ddl,
        )
    if facts.time_type is not None:
        yield Finding(
            "error",
            "time-type",
            table.name,
            f"{table.columns['claim_time'].name} is {facts.time_type}; claims keep whole seconds since 1970 in it",
            "give claim_time a BIGINT column of its own",
        )
    for role, kind in facts.wrong_types.items():
        name = table.columns[role].name
        yield Finding(
            "error",
            "wrong-type",
            table.name,
            f"{name} is {kind} and cannot hold {role}: every claim that writes it would fail, or overwrite your values",
            f"map another column, or none: columns={{{role!r}: None}}",
        )
    if facts.status_is_enum:
        yield Finding(
            "warning",
            "enum-status",
            table.name,
            f"{table.status.name} is an ENUM: each new state rewrites or locks the table",
            f"make {table.status.name} a TINYINT or SMALLINT",
        )


def _of_storage(table: ClaimTable, facts: TableFacts) -> Iterator[Finding]:
    if facts.storage.trouble:
        remedy = (facts.storage.remedy or "").format(table=facts.quoted_name)
        yield Finding("error", "storage", table.name, facts.storage.trouble, remedy)


def _of_server(table: ClaimTable, server: ServerFacts, task: Task) -> Iterator[Finding]:
    if server.read_only:
        yield Finding(
            "error",
            "read-only",
            table.name,
            "the server is read-only, a replica or one in the middle of a failover: nothing can be claimed",
            "point the database URL at the primary",
        )
    if server.isolation_trouble:
        yield Finding("warning", "isolation", table.name, server.isolation_trouble)
    if server.max_connections is not None:
        needed = task.processes * CONNECTIONS_PER_PROCESS
        if needed > CONNECTIONS_SHARE * server.max_connections:
            yield Finding(
                "warning",
                "connections",
                table.name,
                f"{task.processes} worker processes need {needed} connections and the server allows "
                f"{server.max_connections} in all",
                "raise max_connections or lower the worker's concurrency",
            )


def _of_task(claims: Claims, task: Task, server: ServerFacts) -> Iterator[Finding]:
    table = claims.table
    if not table.has("lease_seconds"):
        yield from _of_lease(table, task)
    if task.max_retries != 0:
        for role in ("next_retry_time", "retry_count"):
            if not table.has(role):
                yield Finding(
                    "error",
                    "no-retry-column",
                    table.name,
                    f"task {task.name} has max_retries={task.max_retries} and the table no column for {role}",
                    f"add the column, map it with columns={{{role!r}: ...}}, or set max_retries=0",
                )
    if task.max_reclaims is not None and not table.has("reclaim_count"):
        yield Finding(
            "warning",
            "no-reclaim-count",
            table.name,
            "without a column for reclaim_count a row that kills its worker each time is tried for ever",
            "add a SMALLINT NOT NULL DEFAULT 0 column and map it, or set max_reclaims=None",
        )
    if task.transactional and claims.database.dialect.one_writer:
        yield Finding(
            "warning",
            "one-writer",
            table.name,
            "this database has one writer at a time: with transactional=True one consumer works and the others wait",
            "use concurrency=1, or a database server",
        )
    if task.skip_locked and not (server.knows_skip_locked or claims.database.dialect.claims_in_one_statement):
        yield Finding(
            "error", "skip-locked", table.name, "the server does not know SKIP LOCKED", "leave skip_locked=False"
        )


def _of_lease(table: ClaimTable, task: Task) -> Iterator[Finding]:
    remedy = "add an INT column and map it with columns={'lease_seconds': ...}"
    if task.lease_seconds is None:
        yield Finding(
            "error",
            "no-lease-column",
            table.name,
            f"task {task.name} has lease_seconds=None, which only a column for lease_seconds can tell to other workers",
            remedy,
        )
    for name, lease in task.siblings.items():
        if lease != task.lease_seconds:
            yield Finding(
                "error",
                "two-leases",
                table.name,
                f"tasks {task.name} and {name} have lease_seconds={task.lease_seconds} and {lease} on one table, and "
                "without a column for it the shorter one would take live rows of the longer one",
                remedy + ", or give both the same lease",
            )


def _of_indexes(claims: Claims, facts: TableFacts, task: Task) -> Iterator[Finding]:
    table = claims.table
    status, key = table.status.name, table.key.name
    on_table = f"ON {facts.quoted_name}"
    if not any(columns in ((status, key), (status,)) for columns in facts.indexes.values()):
        yield Finding(
            "warning",
            "no-index",
            table.name,
            f"no index on ({status}, {key}): every claim reads all finished rows, 100 times slower at a million",
            f"CREATE INDEX {facts.quoted_index('claim')} {on_table} ({facts.quote(status)}, {facts.quote(key)})",
        )
    if facts.wants_partial_index:
        only_pending = f"{facts.quote(status)} = {facts.literal(table.values[Status.PENDING])}"
        yield Finding(
            "warning",
            "no-partial-index",
            table.name,
            f"no index on ({key}) of only the pending rows: the planner walks the primary key past all finished ones",
            f"CREATE INDEX {facts.quoted_index('pending')} {on_table} ({facts.quote(key)}) WHERE {only_pending}",
        )
    due = table.column("next_retry_time")
    retries = task.max_retries != 0 and due is not None and not table.waits_as_pending
    if retries and due is not None and (status, due.name) not in {each[:2] for each in facts.indexes.values()}:
        yield Finding(
            "warning",
            "no-retry-index",
            table.name,
            f"no index on ({status}, {due.name}): looking for due retries reads all of them",
            f"CREATE INDEX {facts.quoted_index('retry')} {on_table} ({facts.quote(status)}, {facts.quote(due.name)})",
        )
    allowed = {(status, key), (status,)} | ({(status, due.name)} if due is not None else set())
    changing = {column.name for role, column in table.columns.items() if role != "created_time"}
    for name, columns in facts.indexes.items():
        if columns not in allowed and changing.intersection(columns):
            yield Finding(
                "warning",
                "extra-index",
                table.name,
                f"index {name} ({', '.join(columns)}) holds a column that every claim changes: each claim rewrites it, "
                "and statements that reach rows through it deadlock with claims",
                f"drop {name}, or leave {', '.join(sorted(changing.intersection(columns)))} out of it",
            )


def _of_use(link: Link, claims: Claims, facts: TableFacts, task: Task) -> Iterator[Finding]:
    """What only the live server can tell: privileges, plans, its clock."""
    table = claims.table
    try:
        claims.probe(link)
    except StatementRefused as error:
        yield Finding("error", "refused", table.name, str(error), "grant SELECT and UPDATE on the table")
        return
    skew = server_time(link) - time.time()
    if not -task.max_clock_skew - 1 <= skew <= task.max_clock_skew:
        yield Finding(
            "warning",
            "clock",
            table.name,
            f"this machine's clock and the database's differ by {abs(skew):.0f} s; leases and due times follow the "
            "database's, logs this machine's",
            "synchronise the clocks (NTP)",
        )
    if facts.storage.rows is not None and facts.storage.rows >= ROWS_THAT_TELL:
        yield from _of_plans(link, claims)


def _of_plans(link: Link, claims: Claims) -> Iterator[Finding]:
    for name, statement in claims.explainable().items():
        plan = claims.database.dialect.plan(link.ask, statement)
        # What is due, and what is in progress, is little: sorting it costs nothing.
        if plan is not None and (plan.index is None or (plan.sorts and name in ("candidates", "claim"))):
            how = "reads the whole table" if plan.index is None else "sorts"
            yield Finding(
                "warning",
                "plan",
                claims.table.name,
                f"the server {how} for the statement {name!r}",
                "make the indexes above, then refresh the table's statistics (ANALYZE)",
            )
