"""What an idle fleet and a table full of finished rows cost."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from celery import Celery
from sqlalchemy import Engine, event, text

from celery_claim import ClaimTask, Status
from tests.acceptance import proj
from tests.acceptance.stage import Stage
from tests.conftest import Database
from tests.processes import eventually


class Timed:
    """Seconds that each statement of an engine took, by how it begins."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: list[tuple[str, float]] = []
        event.listen(engine, "before_cursor_execute", self._begin)
        event.listen(engine, "after_cursor_execute", self._end)

    def _begin(self, connection: Any, *_: Any) -> None:
        connection.info["began"] = time.perf_counter()

    def _end(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        self.seconds.append((statement, time.perf_counter() - connection.info["began"]))

    def median(self, *words: str) -> float:
        """The median of the statements that hold all of these words."""
        return statistics.median(
            seconds for statement, seconds in self.seconds if all(word in statement for word in words)
        )


def in_process(database: Database, **options: Any) -> ClaimTask:
    app = Celery("load", broker="memory://", set_as_current=False)
    app.conf.claim_database_url = database.url

    @app.task(base=ClaimTask, model=proj.Job, name="load.work", shared=False, **options)
    def work(row: Any) -> None: ...

    task: ClaimTask = app.tasks["load.work"]
    return task


def fill(database: Database, rows: int) -> None:
    """Finished rows with low keys, by doubling: the server does it alone."""
    engine = database.engine()
    proj.Base.metadata.create_all(engine)
    columns = "id, work, status, retry_count, reclaim_count"
    with engine.begin() as connection:
        connection.execute(text(f"INSERT INTO job ({columns}) VALUES (1, '', 2, 0, 0)"))
    have = 1
    while have < rows:
        more = min(have, rows - have)
        with engine.begin() as connection:
            connection.execute(
                text(f"INSERT INTO job ({columns}) SELECT id + {have}, '', 2, 0, 0 FROM job WHERE id <= {more}")
            )
        have += more


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.needs("network")
def test_a_million_finished_rows_slow_down_neither_claim_nor_recover(database: Database) -> None:
    """C23, with 300,000 finished rows."""
    rows = 300_000
    fill(database, rows)
    work = in_process(database, batch_size=5)
    engine = database.engine()
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE job SET status = 0 WHERE id > {rows - 105}")
        expired = "status = 1, claim_time = 1, lease_seconds = 2, claim_token = 'gone'"
        connection.exec_driver_sql(f"UPDATE job SET {expired} WHERE id > {rows - 5}")
    analyze = "ANALYZE job" if database.name == "postgresql" else "ANALYZE TABLE job"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(analyze)
    timed = Timed(work.claims.database.engine)

    read = rows_read_by_scans(database)
    began_at = time.perf_counter()
    assert len(work.recover()) == 5
    recovering = time.perf_counter() - began_at
    threads = [threading.Thread(target=work.drain) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    claims = ("UPDATE", "claim_token=", "lease_seconds=")
    taken = sum(all(word in statement for word in claims) for statement, _ in timed.seconds)
    assert (rows_read_by_scans(database) - read) / taken < 1000
    assert recovering < 0.3
    # The rest of the time is eight threads waiting for two processors.
    assert timed.median(*claims) < 0.1, timed.median(*claims)
    assert work.status()["succeeded"] == rows


def rows_read_by_scans(database: Database) -> int:
    """Rows that the server has read by walking a table from its beginning."""
    if database.can("mysql"):
        return int(database.admin("SHOW GLOBAL STATUS LIKE 'Handler_read_rnd_next'")[0][1])
    database.admin("SELECT pg_stat_clear_snapshot()")
    return int(database.admin("SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'job'")[0][0])


@pytest.mark.slow
@pytest.mark.alone
def test_a_forgotten_transaction_of_a_reader_slows_claims_down_little(postgresql: Database) -> None:
    """C23, PostgreSQL: dead row versions cannot be removed while 6,000 rows pass."""
    work = in_process(postgresql, batch_size=20, write_back="batch")
    engine = postgresql.engine()
    proj.Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO job (id, work) SELECT n, '' FROM generate_series(1, 6000) n"))
        connection.execute(text("ANALYZE job"))
    timed = Timed(work.claims.database.engine)
    with engine.connect() as reader:
        reader.execute(text("BEGIN ISOLATION LEVEL REPEATABLE READ"))
        reader.execute(text("SELECT count(*) FROM job"))
        work.drain()

    claims = [seconds for statement, seconds in timed.seconds if "SKIP LOCKED" in statement]
    assert work.status()["succeeded"] == 6000
    first, last = claims[5:55], claims[-51:-1]
    assert statistics.quantiles(last, n=20)[-1] < 5 * statistics.quantiles(first, n=20)[-1]


@pytest.mark.slow
def test_a_missing_index_is_told_when_the_worker_starts(mariadb: Database, stage: Callable[..., Stage]) -> None:
    """C23, the index; the worker starts nevertheless."""
    show = stage(mariadb)
    mariadb.admin("ALTER TABLE job DROP INDEX ix_job_claim, DROP INDEX ix_job_retry")

    worker = show.worker("-c", "1")

    assert "no index on (status, id)" in worker.log()
    assert "CREATE INDEX ix_job_claim ON job (status, id)" in worker.log().replace("`", "")


@pytest.mark.slow
@pytest.mark.alone
def test_an_idle_fleet_asks_little_and_not_in_lock_step(mariadb: Database, stage: Callable[..., Stage]) -> None:
    """C25: 20 consumers of a window with a poll of 5 s in 4 processes, watched for 20 s."""
    poll, seconds = 5.0, 20
    show = stage(
        mariadb,
        window={"frequency": poll, "concurrency": 20},
        settings={"claim_maintenance_interval": 5.0, "claim_node_heartbeat": 5.0, "claim_node_timeout": 20.0},
    )
    worker = show.worker("-c", "4")
    show.beat()
    eventually(lambda: worker.log().count("succeeded in") >= 25, timeout=60)
    tree = [psutil.Process(pid) for pid in (worker.pid, *worker.children())]
    questions, cpu = asked(mariadb), {process.pid: sum(process.cpu_times()[:2]) for process in tree}
    began_at = time.monotonic()
    eventually(lambda: time.monotonic() > began_at + seconds, timeout=seconds + 5)
    passed = time.monotonic() - began_at

    # A run of an empty table: it is taken, two statements for that; is a retry due, is there a row; its end, a
    # transaction of three; what the pool sends when a connection comes back. And a share of heartbeats, fires and
    # maintenance.
    statements = asked(mariadb) - questions
    assert statements < 20 * passed / poll * 18, statements
    used = {process.pid: sum(process.cpu_times()[:2]) - cpu[process.pid] for process in tree}
    assert max(used.values()) / passed < 0.05, used

    before = asked(mariadb)
    added_at = time.monotonic()
    show.add([1])
    assert show.started(1)["at"] - added_at < 2 * poll
    assert show.ended(1) == {Status.SUCCEEDED: 1}
    assert asked(mariadb) - before < 20 * 18 * 2 + 100
    assert json.loads(show.log_path.read_text().splitlines()[0])["keys"] == [1]
    assert show.starts() == Counter({1: 1})


def asked(database: Database) -> int:
    """Statements that the server has been asked."""
    return int(database.admin("SHOW GLOBAL STATUS LIKE 'Questions'")[0][1])
