"""Tables as they are found: odd names, odd keys, odd texts, odd drivers. Every row is handled once, or fails alone."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    TypeDecorator,
    create_engine,
    insert,
    select,
    text,
)
from sqlalchemy.dialects.mysql import BIGINT, CHAR

from celery_claim import ClaimTask, Done, Status
from celery_claim.claims.claim import claim
from celery_claim.claims.renew import Held
from celery_claim.exceptions import ConfigurationError
from tests.conftest import Database

EMOJI = "\U0001f4a5"


def program(database: Database, **settings: Any) -> Celery:
    """An app of its own on the database."""
    app = Celery("odd", broker="memory://", set_as_current=False)
    app.conf.update(claim_database_url=database.url, **settings)
    return app


def claim_columns() -> list[Column[Any]]:
    return [
        Column("status", SmallInteger, nullable=False, server_default="0"),
        Column("claim_time", BigInteger),
        Column("lease_seconds", Integer),
        Column("claim_token", String(32)),
        Column("worker_id", String(128)),
        Column("retry_count", SmallInteger, nullable=False, server_default="0"),
        Column("reclaim_count", SmallInteger, nullable=False, server_default="0"),
        Column("next_retry_time", BigInteger),
        Column("error_message", String(500)),
    ]


def jobs(*columns: Column[Any], **options: Any) -> Table:
    table = Table("job", MetaData(), *columns, *claim_columns(), **options)
    Index("ix_job_claim", table.c.status, next(iter(table.primary_key)))
    return table


def states(engine: Engine, table: Table) -> dict[Any, int]:
    key = next(iter(table.primary_key))
    with engine.connect() as connection:
        return dict(connection.execute(select(key, table.c.status)).all())


@pytest.mark.parametrize("how", ["declared", "reflected"])
def test_reserved_words_and_blanks_are_names_like_others(database: Database, how: str) -> None:
    """C20; the schema `select` where the database has schemas beside ours."""
    engine = database.engine()
    schema = None
    if database.name == "postgresql":
        schema = "select"
        database.admin('CREATE SCHEMA "select" AUTHORIZATION claim')
    # SQLAlchemy cannot reflect a backtick from MySQL: it keeps it doubled, as SHOW CREATE TABLE prints it.
    token = "it's" if how == "reflected" and database.can("mysql") else "it`s"
    table = Table(
        "order",
        MetaData(),
        Column("key", Integer, primary_key=True, autoincrement=False),
        Column("status", SmallInteger, nullable=False),
        Column("rank", Integer),
        Column("group", Integer),
        Column("claimed at", BigInteger),
        Column(token, String(32).with_variant(CHAR(32, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")),
        schema=schema,
    )
    table.create(engine)
    with engine.begin() as connection:
        connection.execute(insert(table), [{"key": n, "status": 0, "rank": n * 2} for n in range(10)])
    app = program(database)
    names = {"claim_time": "claimed at", "claim_token": token}
    seen: list[Any] = []

    where = {"model": table} if how == "declared" else {"table": "order", "schema": schema}

    @app.task(base=ClaimTask, shared=False, columns=names, max_reclaims=None, **where)
    def consume(row: Any) -> Done:
        seen.append((row.key, row.rank))
        return Done({"group": row.rank + 1})

    counts = consume.drain()

    assert counts.succeeded == 10
    assert sorted(seen) == [(n, n * 2) for n in range(10)]
    with engine.connect() as connection:
        assert set(connection.execute(select(table.c.key, table.c.group))) == {(n, n * 2 + 1) for n in range(10)}
    assert not [finding for finding in consume.check() if finding.level == "error"]
    assert consume.status()["succeeded"] == 10


NASTY = ["jobs; DROP TABLE x", "jobs` WHERE 1=1 -- ", 'jobs" WHERE 1=1 --', "t" * 300]


def test_sql_in_a_table_or_column_name_is_refused_and_never_run(database: Database) -> None:
    """C21: the names are configuration; a message can carry none."""
    engine = database.engine()
    jobs(Column("id", Integer, primary_key=True, autoincrement=False)).create(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE x (id INTEGER)"))
        connection.execute(text("INSERT INTO job (id, status) VALUES (1, 0)"))
    app = program(database)

    for number, name in enumerate(NASTY):

        @app.task(base=ClaimTask, shared=False, table=name, name=f"table{number}")
        def consume(row: Any) -> None:
            raise AssertionError("a row was claimed")

        with pytest.raises(ConfigurationError):
            consume.drain()

    for number, name in enumerate(["status=(SELECT 1)", "id;--", *NASTY]):

        @app.task(base=ClaimTask, shared=False, table="job", columns={"status": name}, name=f"column{number}")
        def consume(row: Any) -> None:
            raise AssertionError("a row was claimed")

        with pytest.raises(ConfigurationError, match="has no column"):
            consume.drain()

    @app.task(base=ClaimTask, shared=False, table="job", name="plain")
    def plain(row: Any) -> None: ...

    with pytest.raises(TypeError):
        plain.apply(kwargs={"claim": {"max_run_time": "1; DROP TABLE x"}}, throw=True)
    plain.apply(kwargs={"claim": {"table": "x"}}, throw=True)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM x")).scalar() == 0
        assert connection.execute(text("SELECT count(*) FROM job")).scalar() == 1


class RawUUID(TypeDecorator[uuid.UUID]):
    """A UUID kept as its 16 bytes."""

    impl = LargeBinary(16)
    cache_ok = True

    def process_bind_param(self, value: uuid.UUID | None, dialect: Any) -> bytes | None:
        return None if value is None else value.bytes

    def process_result_value(self, value: bytes | None, dialect: Any) -> uuid.UUID | None:
        return None if value is None else uuid.UUID(bytes=bytes(value))


class BinaryUUID(RawUUID):
    cache_ok = True

    def load_dialect_impl(self, dialect: Any) -> Any:
        from sqlalchemy.dialects.mysql import BINARY

        return dialect.type_descriptor(BINARY(16) if dialect.name in ("mysql", "mariadb") else LargeBinary(16))


UUIDS = [uuid.UUID(int=n) for n in (0, 1 << 127, 0x27005C27005C27005C27005C27005C27)]
KEYS = {
    "unsigned": (BIGINT(unsigned=True), [1, 2**53 + 1, 2033735037361704962, 2**64 - 1]),
    "signed": (BigInteger(), [-(2**63), -5, 0, 2**53 + 1, 2**63 - 1]),
    "char": (String(36), [str(each) for each in UUIDS]),
    "binary": (BinaryUUID(), UUIDS),
}


@pytest.mark.parametrize("kind", ["signed", "char", "binary"])
def test_the_handler_gets_exactly_the_keys_and_exactly_these_rows_are_done(database: Database, kind: str) -> None:
    """C22."""
    handle_keys(database, *KEYS[kind])


@pytest.mark.needs("mysql")
def test_the_handler_gets_exactly_the_unsigned_keys_up_to_the_largest(database: Database) -> None:
    """C22, on the databases that have unsigned keys."""
    handle_keys(database, *KEYS["unsigned"])


def handle_keys(database: Database, key_type: Any, keys: list[Any]) -> None:
    engine = database.engine()
    table = jobs(Column("id", key_type, primary_key=True, autoincrement=False))
    table.create(engine)
    with engine.begin() as connection:
        connection.execute(insert(table), [{"id": key} for key in keys])
    app = program(database)
    seen: list[Any] = []
    held_back = keys[1]

    @app.task(base=ClaimTask, shared=False, model=table)
    def consume(row: Any) -> None:
        seen.append(row.id)
        if row.id == held_back:
            raise ValueError("held back")

    counts = consume.drain()

    assert sorted(seen) == sorted(keys)
    assert (counts.succeeded, counts.failed) == (len(keys) - 1, 1)
    expected = {key: Status.FAILED if key == held_back else Status.SUCCEEDED for key in keys}
    assert states(engine, table) == expected
    assert consume.retry_failed([held_back]) == [held_back]
    assert consume.cancel([held_back]) == [held_back]
    assert states(engine, table) == {**expected, held_back: Status.CANCELLED}


@pytest.mark.needs("mysql")
@pytest.mark.parametrize("strict", [True, False])
def test_a_text_the_table_cannot_hold_never_repeats_the_work(database: Database, strict: bool) -> None:
    """C14: columns in utf8mb3; with and without a strict sql_mode."""
    engine = database.engine()
    table = jobs(
        Column("id", Integer, primary_key=True, autoincrement=False), Column("result", Text), mysql_charset="utf8"
    )
    table.create(engine)
    with engine.begin() as connection:
        connection.execute(insert(table), [{"id": n} for n in range(1, 8)])
    mode = "STRICT_TRANS_TABLES" if strict else ""
    options = {"connect_args": {"init_command": f"SET sql_mode='{mode}'"}}
    app = program(database, claim_database_engine_options=options)
    seen: Counter[int] = Counter()

    @app.task(base=ClaimTask, shared=False, model=table, max_retries=2, retry_backoff=0, failure_breaker=None)
    def consume(row: Any) -> Done | None:
        seen[row.id] += 1
        if row.id == 1:
            return Done({"result": f"sent {EMOJI}"})
        if row.id == 2:
            raise ValueError(f"cannot send {EMOJI}")
        return None

    consume.drain()
    for _ in range(3):
        consume.drain()

    assert seen == {1: 1, 2: 3, **dict.fromkeys(range(3, 8), 1)}
    assert states(engine, table) == {n: Status.FAILED if n == 2 else Status.SUCCEEDED for n in range(1, 8)}
    with engine.connect() as connection:
        result = connection.scalar(select(table.c.result).where(table.c.id == 1))
        error = connection.scalar(select(table.c.error_message).where(table.c.id == 2))
    assert result.startswith("sent ") and EMOJI not in result and len(result) > len("sent ")
    assert error.startswith("ValueError: cannot send ") and EMOJI not in error


@pytest.mark.needs("mysql")
@pytest.mark.parametrize("drained", ["together", "one by one"])
def test_rows_that_cannot_be_decoded_fail_alone(database: Database, drained: str) -> None:
    """C16: JSON cut by a lax server, half of it, none of it, and bytes that are no text, before 9 good rows."""
    engine = database.engine()

    class Bytes(TypeDecorator[str]):
        impl = LargeBinary
        cache_ok = True

        def process_bind_param(self, value: Any, dialect: Any) -> Any:
            return value

        def process_result_value(self, value: bytes | None, dialect: Any) -> str | None:
            return None if value is None else bytes(value).decode()

    class StrictJSON(TypeDecorator[Any]):
        """JSON in a TEXT column, as many programs keep it."""

        impl = Text
        cache_ok = True

        def process_result_value(self, value: str | None, dialect: Any) -> Any:
            import json

            return json.loads(value)  # type: ignore[arg-type]  # NULL raises, as it would in such a program

    table = jobs(
        Column("id", Integer, primary_key=True, autoincrement=False),
        Column("payload", StrictJSON),
        Column("raw", Bytes),
    )
    table.create(engine)
    cut = '{"text": "' + "x" * 70000 + '"}'
    rows: list[tuple[Any, ...]] = [(1, cut, b"fine"), (2, "{", b"fine"), (3, None, b"fine"), (4, "{}", b"\xff\xfe")]
    rows += [(n, '{"a": 1}', b"fine") for n in range(5, 14)]
    lax = database.engine(connect_args={"init_command": "SET sql_mode=''"})
    with lax.begin() as connection:
        for row in rows:
            connection.exec_driver_sql("INSERT INTO job (id, payload, raw) VALUES (%s, %s, %s)", row)
    app = program(database)
    seen: list[int] = []

    @app.task(
        base=ClaimTask, model=table, batch_size=20 if drained == "together" else 1, max_retries=1, retry_backoff=0
    )
    def consume(row: Any) -> None:
        seen.append(row.id)

    for _ in range(3):
        consume.drain()

    assert seen == list(range(5, 14))
    assert states(engine, table) == {n: Status.FAILED if n < 5 else Status.SUCCEEDED for n in range(1, 14)}
    with engine.connect() as connection:
        errors = connection.execute(text("SELECT error_message FROM job WHERE id < 5 ORDER BY id")).scalars().all()
    assert [error.split(":")[0] for error in errors] == ["JSONDecodeError"] * 2 + ["TypeError", "UnicodeDecodeError"]


def plain_driver(database: Database, driver: str) -> Callable[[], Any]:
    """How to connect with a driver that counts matched rows (found) or changed rows (changed)."""
    from tests.servers import PASSWORD, USER

    place = {"host": "127.0.0.1", "port": database.server.port, "user": USER, "password": PASSWORD}
    if driver == "mysqlclient, changed":
        import MySQLdb

        return lambda: MySQLdb.connect(**place, database=database.schema, charset="utf8mb4")
    import pymysql
    from pymysql.constants import CLIENT

    flag = CLIENT.FOUND_ROWS if driver == "PyMySQL, found" else 0
    return lambda: pymysql.connect(**place, database=database.schema, client_flag=flag)


@pytest.mark.needs("mysql")
@pytest.mark.parametrize("driver", ["PyMySQL, changed", "PyMySQL, found", "mysqlclient, changed"])
def test_it_does_not_matter_whether_the_driver_counts_changed_or_matched_rows(database: Database, driver: str) -> None:
    """C13."""
    table = jobs(Column("id", Integer, primary_key=True, autoincrement=False))
    table.create(database.engine())
    with database.engine().begin() as connection:
        connection.execute(insert(table), [{"id": n} for n in range(1, 201)])
    dialect = "mysql+mysqldb" if driver.startswith("mysqlclient") else "mysql+pymysql"
    engine = create_engine(f"{dialect}://", creator=plain_driver(database, driver))
    app = program(database)
    seen: list[int] = []
    lost: list[Any] = []

    @app.task(base=ClaimTask, shared=False, model=table, engine=engine, batch_size=7)
    def consume(row: Any) -> None:
        seen.append(row.id)

    # Renewed three times inside one second, nothing is reported lost.
    claims = consume.claims
    with claims.linked() as link:
        claimed = claim(link, claims.statements, limit=10, lease_seconds=60, worker_id="test")
        held = Held(claims.statements, claimed, lease_seconds=60, on_lost=lost.extend)
        began_at = time.monotonic()
        for _ in range(3):
            held._renew(link)
        assert time.monotonic() - began_at < 1
    assert lost == []
    assert held.open == sorted(claimed.rows)
    consume.release(list(claimed.rows))

    # Four consumers race for all rows: each has one winner.
    threads = [threading.Thread(target=consume.drain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 201))
    assert set(states(database.engine(), table).values()) == {Status.SUCCEEDED}
    engine.dispose()
