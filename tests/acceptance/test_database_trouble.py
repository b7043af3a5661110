"""What databases and networks do to workers at night: no row fails, none is lost, and the log says it once."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_claim import Status
from tests.acceptance.stage import Stage
from tests.conftest import Database
from tests.processes import eventually
from tests.proxy import Proxy

POLL = 1.0


@contextlib.contextmanager
def server_variables(database: Database, **values: Any) -> Iterator[None]:
    """Global variables of a MySQL or MariaDB server, set for the length of a block."""
    before = {name: database.admin(f"SELECT @@GLOBAL.{name}")[0][0] for name in values}
    try:
        database.admin(*(f"SET GLOBAL {name} = {value!r}" for name, value in values.items()))
        yield
    finally:
        database.admin(*(f"SET GLOBAL {name} = {value!r}" for name, value in before.items()))


def complaints(log: str) -> Counter[str]:
    """How many warnings and errors each process has logged."""
    return Counter(re.findall(r"(?:WARNING|ERROR|CRITICAL)/(\S+)\]", log))


@pytest.mark.slow
def test_lock_waits_delay_rows_and_fail_none(mariadb: Database, stage: Callable[..., Stage]) -> None:
    """C01, with 600 rows of 20 ms, and 8 s of another session that locks 15 random rows for 7 s at a time.

    7 s are longer than a statement of ours waits.
    """
    rows = 600
    over = threading.Event()
    show = stage(mariadb, lease_seconds=60)
    show.add(range(1, rows + 1), work="sleep 0.02")

    def lock_at_random(choose: random.Random) -> None:
        engine = mariadb.engine()
        while not over.is_set():
            chosen = ", ".join(map(str, choose.sample(range(1, rows + 1), 15)))
            with engine.begin() as connection:
                connection.exec_driver_sql(f"SELECT id FROM job WHERE id IN ({chosen}) FOR UPDATE")
                over.wait(7)

    with server_variables(mariadb, tx_isolation="REPEATABLE-READ", innodb_lock_wait_timeout=1):
        worker = show.worker("-c", "8")
        locker = threading.Thread(target=lock_at_random, args=(random.Random(1),))
        locker.start()
        locked_at = time.monotonic()
        try:
            show.send(8)
            eventually(lambda: show.states().get(Status.SUCCEEDED, 0) > rows / 4, timeout=60)
            eventually(lambda: time.monotonic() > locked_at + 8, timeout=15)
        finally:
            over.set()
            locker.join()
        show.send(8)  # a run that met nothing but locks may have ended
        assert show.ended(rows, timeout=90) == {Status.SUCCEEDED: rows}

    assert set(show.starts().values()) == {1}
    assert set(show.column("retry_count").values()) == set(show.column("reclaim_count").values()) == {0}
    waits = worker.log().count("Lock wait timeout exceeded")
    assert waits > 0, "no statement met a lock, the test showed nothing"
    assert "Traceback" not in worker.log()
    assert "ERROR" not in worker.log()


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["REPEATABLE-READ", "SERIALIZABLE", "READ-COMMITTED"])
def test_an_idle_consumer_sees_new_rows_at_once_and_keeps_no_transaction_open(
    mariadb: Database, stage: Callable[..., Stage], isolation: str
) -> None:
    """C09, idle for 6 s."""
    with server_variables(mariadb, tx_isolation=isolation):
        show = stage(mariadb, window={"frequency": POLL, "concurrency": 1})
        worker = show.worker("-c", "2")
        show.beat()
        eventually(lambda: len(re.findall(r"proj\.work\[\S+\] succeeded", worker.log())) >= 5, timeout=30)
        old = mariadb.admin(
            "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_started < NOW() - INTERVAL 4 SECOND"
        )
        added_at = time.monotonic()
        show.add(range(1, 6))

        assert show.ended(5) == {Status.SUCCEEDED: 5}

    assert max(each["at"] for each in show.happened("start")) - added_at <= 2 * POLL + 1
    assert old == [(0,)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mariadb", "mysql56"])
def test_connections_closed_for_idleness_cost_nothing(
    request: pytest.FixtureRequest, stage: Callable[..., Stage], kind: str
) -> None:
    """C10, with wait_timeout 2 s: between two batches of work, and while a handler works."""
    database = request.getfixturevalue(kind)
    with server_variables(database, wait_timeout=2):
        show = stage(database, settings={"claim_maintenance_interval": 60.0})
        worker = show.worker("-c", "1")
        show.send()
        show.add([1])
        show.send()
        show.ended(1)
        idle_since = time.monotonic()
        eventually(lambda: time.monotonic() > idle_since + 5, timeout=10)
        show.add(range(2, 7))
        show.add([7], work="sleep 5")
        show.add(range(8, 12))
        show.send()

        assert show.ended(11) == {Status.SUCCEEDED: 11}

    assert set(show.starts().values()) == {1}
    assert set(show.column("reclaim_count").values()) == {0}
    assert "ERROR" not in worker.log()
    assert "Traceback" not in worker.log()


@pytest.mark.slow
@pytest.mark.needs("network")
def test_rows_whose_statements_got_no_answer_run_once(
    database: Database, stage: Callable[..., Stage], proxied: Callable[[Database], Proxy]
) -> None:
    """C12: a fifth of all UPDATEs are done by the server and the worker's connection is cut before it hears of it."""
    proxy = proxied(database)
    show = stage(database, url=proxy.url, lease_seconds=3, batch_size=3)
    show.add(range(1, 51), work="sleep 0.02")
    worker = show.worker("-c", "3")
    proxy.swallow_reply(rb"^UPDATE", times=None, share=0.2)
    cut_at = len(proxy.swallowed)

    show.driven(50, consumers=3)

    assert show.states() == {Status.SUCCEEDED: 50}
    assert len(proxy.swallowed) - cut_at >= 5, "no answer was lost, the test showed nothing"
    reclaims = show.column("reclaim_count")
    twice = {number for number, times in show.starts().items() if times > 1}
    assert all(reclaims[number] for number in twice), "a row ran twice that its owner had not lost"
    assert len(show.starts()) == 50
    assert "Traceback" not in worker.log()


def break_table(database: Database) -> tuple[str, str, str]:
    """Statements that make the server refuse claims and allow them again, and a word of the server's refusal."""
    if database.name == "postgresql":
        return "REVOKE UPDATE ON job FROM claim", "GRANT UPDATE ON job TO claim", "permission denied"
    rename = "ALTER TABLE job CHANGE {} {} TINYINT UNSIGNED NOT NULL DEFAULT 0"
    return rename.format("status", "state"), rename.format("state", "status"), "Unknown column"


@pytest.mark.slow
@pytest.mark.needs("network")
def test_a_table_that_refuses_claims_is_told_of_once_and_works_again_by_itself(
    database: Database, stage: Callable[..., Stage]
) -> None:
    """C18, watched for 5 polls."""
    poll = 1.0
    show = stage(database, window={"frequency": poll, "concurrency": 2})
    worker = show.worker("-c", "2")
    show.beat()
    show.add([1])
    show.ended(1)
    quiet = complaints(worker.log())
    refuse, allow, words = break_table(database)
    database.admin(refuse)
    refused_at = time.monotonic()
    if database.name == "postgresql":
        show.add(range(2, 7))
    eventually(lambda: words in worker.log(), timeout=2 * poll + 1)
    status = show.command("claim", "status")
    eventually(lambda: time.monotonic() > refused_at + 5 * poll, timeout=10)

    said = complaints(worker.log())
    assert max((said - quiet).values()) <= 1, worker.log()
    assert words in status.stdout + status.stderr
    assert worker.running

    database.admin(allow)
    if database.name != "postgresql":
        show.add(range(2, 7))
    assert show.ended(6) == {Status.SUCCEEDED: 6}
    eventually(lambda: "works again" in worker.log())


FORKED = """
import json, os, time
from celery import Celery
from sqlalchemy import BigInteger, create_engine, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from celery_claim import Claimable, ClaimTask

app = Celery("forked", broker=os.environ["BROKER"])
app.conf.claim_database_url = os.environ["DATABASE"]
app.conf.claim_maintenance_interval = 0.2

class Base(DeclarativeBase): ...

class Job(Claimable, Base):
    __tablename__ = "job"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    work: Mapped[str]

@app.task(base=ClaimTask, model=Job, batch_size=2)
def work(row):
    with work.claims.database.engine.connect() as connection:
        found = connection.scalar(select(Job.id).where(Job.id == row.id))
        session = connection.scalar(text("SELECT CONNECTION_ID()"))
    line = json.dumps({"id": row.id, "found": found, "pid": os.getpid(), "session": session})
    with open(os.environ["LOG"], "a") as log:
        log.write(line + chr(10))
    time.sleep(0.02)

app.finalize()
work.status()   # at import, in the process whose children will fork
"""


@pytest.mark.slow
def test_connections_made_before_the_fork_are_never_used_by_the_children(
    mariadb: Database, stage: Callable[..., Stage], celery_processes: Any
) -> None:
    """C27."""
    show = stage(mariadb)
    show.add(range(1, 401))
    environment = {"BROKER": show.broker, "DATABASE": mariadb.url, "LOG": str(show.log_path)}
    worker = celery_processes.worker(FORKED, "-c", "4", "--max-tasks-per-child=5", env=environment, name="forked")
    show.send(60, task="forked.work", max_run_time=0.2)
    show.driven(400, consumers=8, task="forked.work", max_run_time=0.2)

    seen = [json.loads(line) for line in show.log_path.read_text().splitlines()]
    assert Counter(each["id"] for each in seen) == dict.fromkeys(range(1, 401), 1)
    assert all(each["found"] == each["id"] for each in seen)
    users = {(each["session"], each["pid"]) for each in seen}
    assert len(users) == len({session for session, _ in users}), "two processes used one connection"
    assert len({pid for _, pid in users}) > 4, "no child was replaced, the test showed less than it says"
    for fault in ("(2006", "(2013", "(2014", "Traceback", "ERROR"):
        assert fault not in worker.log()
    # The parent's own connection outlived its children: its maintenance still works.
    show.add([401], status=Status.RETRYING, next_retry_time=1)
    eventually(lambda: show.row(401).status in (Status.PENDING, Status.SUCCEEDED))
