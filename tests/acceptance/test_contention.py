"""Many processes on one table: each row is handled exactly once, nothing deadlocks, nothing is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import struct
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, create_engine, event, func, insert, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from celery_claim import ClaimTask, Status
from tests.acceptance import proj
from tests.conftest import Database
from tests.processes import eventually

#: Rows and consuming processes.
SIZES = {"mariadb": (100_000, 8), "postgresql": (100_000, 8), "mysql56": (20_000, 8), "sqlite": (10_000, 4)}
#: Rows that are there before the consumers start; the inserters add the rest meanwhile.
SHARE_BEFORE = 0.4
INSERTED_AT_ONCE = 500


def engine_of(url: str) -> Engine:
    engine = create_engine(url, poolclass=NullPool)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=60000"))
    return engine


def consume(url: str, folder: Path, number: int, write_back: str, over: Any) -> None:
    """A consuming process: drains until there will be no more rows, and keeps the ids of the handler's calls."""
    seen: list[int] = []
    app = Celery("crowd", broker="memory://", set_as_current=False)
    app.conf.claim_database_url = url

    @app.task(
        base=ClaimTask, model=proj.Job, name="crowd.work", shared=False, batch_size=100, write_back=write_back,
        lease_seconds=60,
    )  # fmt: skip
    def work(row: Any) -> None:
        seen.append(row.id)

    lost = 0
    # Each stands somewhere else among the candidates, as the consumers of a window do.
    place = {"consumer_id": number, "consumers": 8}
    while True:
        last = over.is_set()
        counts = work.apply(kwargs={"claim": place}, throw=True).result
        lost += counts["lost"]
        if last and not counts["claimed"]:
            break
        if not counts["claimed"]:
            time.sleep(0.01)
    (folder / f"seen-{number}").write_bytes(struct.pack(f"<{len(seen)}q", *seen))
    (folder / f"lost-{number}").write_text(str(lost))


def insert_rows(url: str, first: int, last: int) -> None:
    """An inserting process."""
    engine = engine_of(url)
    for start in range(first, last + 1, INSERTED_AT_ONCE):
        rows = [{"id": number, "work": ""} for number in range(start, min(start + INSERTED_AT_ONCE, last + 1))]
        with engine.begin() as connection:
            connection.execute(insert(proj.Job), rows)


def recover_all_the_time(url: str, folder: Path, over: Any) -> None:
    """A recovering process: finds nothing, since every owner lives."""
    app = Celery("crowd", broker="memory://", set_as_current=False)
    app.conf.claim_database_url = url

    @app.task(base=ClaimTask, model=proj.Job, name="crowd.work", shared=False, lease_seconds=60)
    def work(row: Any) -> None: ...

    recovered: list[Any] = []
    while not over.is_set():
        recovered += work.recover()
        work.promote()
        over.wait(0.2)
    (folder / "recovered").write_text(repr(recovered))


def guarded(target: Any, folder: Path, *arguments: Any) -> None:
    """Run in a child process; its traceback is kept for the test to show."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        target(*arguments)
    except BaseException:
        (folder / f"error-{os.getpid()}").write_text(traceback.format_exc())
        raise


def deadlocks(database: Database) -> Any:
    """Something that changes with every deadlock on the server."""
    if database.name == "postgresql":
        database.admin("SELECT pg_stat_clear_snapshot()")
        return database.admin("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    if database.name == "mariadb":
        return database.admin("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")
    # MySQL 5.6 has a metric for it that stays 0; its report holds the latest one, with the time and the transactions.
    report = str(database.admin("SHOW ENGINE INNODB STATUS")[0][2])
    return report.partition("LATEST DETECTED DEADLOCK")[2][:300]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("write_back", ["row", "batch"])
def test_a_crowd_handles_each_row_exactly_once_without_a_deadlock(
    database: Database, tmp_path: Path, write_back: str
) -> None:
    """8 processes, 100,000 rows (MySQL 5.6: 20,000; SQLite: 4 and 10,000), two inserters and a recoverer.

    A quarter of the rows where each is written back by itself: every one is a commit to the disk.
    """
    rows, processes = SIZES[database.name]
    if write_back == "row":
        rows //= 4
    proj.Base.metadata.create_all(database.engine())
    there = int(rows * SHARE_BEFORE)
    insert_rows(database.url, 1, there)
    before = None if database.name == "sqlite" else deadlocks(database)
    context = multiprocessing.get_context("fork")
    over, quiet = context.Event(), context.Event()

    def start(target: Any, *arguments: Any) -> Any:
        process = context.Process(target=guarded, args=(target, tmp_path, *arguments), daemon=True)
        process.start()
        return process

    half = there + (rows - there) // 2
    began_at = time.monotonic()
    consumers = [start(consume, database.url, tmp_path, n, write_back, over) for n in range(processes)]
    recoverer = start(recover_all_the_time, database.url, tmp_path, quiet)
    inserters = [
        start(insert_rows, database.url, there + 1, half),
        start(insert_rows, database.url, half + 1, rows),
    ]
    for process in inserters:
        process.join()
    over.set()
    for process in consumers:
        process.join()
    seconds = time.monotonic() - began_at
    quiet.set()
    recoverer.join()
    print(f"{database.name}, write_back={write_back}: {rows / seconds:.0f} rows/s with {processes} processes")

    errors = [path.read_text() for path in tmp_path.glob("error-*")]
    assert not errors, errors[0]
    seen: Counter[int] = Counter()
    for path in tmp_path.glob("seen-*"):
        seen.update(each for (each,) in struct.iter_unpack("<q", path.read_bytes()))
    assert len(seen) == rows
    assert max(seen.values()) == 1, seen.most_common(5)
    with database.engine().connect() as connection:
        states = select(proj.Job.status, func.count(), func.sum(proj.Job.reclaim_count)).group_by(proj.Job.status)
        assert [tuple(row) for row in connection.execute(states)] == [(Status.SUCCEEDED, rows, 0)]
    assert {path.read_text() for path in tmp_path.glob("lost-*")} == {"0"}
    assert (tmp_path / "recovered").read_text() == "[]"
    if database.name != "sqlite":  # its writers wait for one lock and cannot deadlock
        assert deadlocks(database) == before


@pytest.mark.needs("row_locks")
def test_the_deadlocks_that_the_crowd_must_not_have_would_be_counted(database: Database) -> None:
    """Two sessions that lock two rows in opposite orders."""
    proj.Base.metadata.create_all(database.engine())
    insert_rows(database.url, 1, 2)
    before = deadlocks(database)
    both = threading.Barrier(2)
    victims = []

    def lock(first: int, second: int) -> None:
        with database.engine().connect() as connection:
            connection.exec_driver_sql(f"UPDATE job SET work = 'x' WHERE id = {first}")
            both.wait(10)
            try:
                connection.exec_driver_sql(f"UPDATE job SET work = 'x' WHERE id = {second}")
            except OperationalError as error:
                victims.append(error)

    threads = [threading.Thread(target=lock, args=order) for order in ((1, 2), (2, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(victims) == 1
    eventually(lambda: deadlocks(database) != before)
