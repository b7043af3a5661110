"""The ground the other tests stand on: servers that are real and leave no trace, faults that are real faults."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from textwrap import dedent
from threading import Thread

import psutil
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tests.processes import REPOSITORY, is_gone, shifted_clock
from tests.servers import PASSWORD, Redis

CREATE = text("CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER)")
INSERT = text("INSERT INTO t (id, n) VALUES (:id, 0)")
UPDATE = text("UPDATE t SET n = n + 1 WHERE id = :id")
NUMBERS = text("SELECT n FROM t ORDER BY id")


@pytest.fixture
def counters(database):
    """An engine on a fresh database with a table of two counters."""
    engine = database.engine()
    with engine.begin() as connection:
        connection.execute(CREATE)
        connection.execute(INSERT, [{"id": 1}, {"id": 2}])
    return engine


def numbers(engine):
    with engine.connect() as connection:
        return list(connection.execute(NUMBERS).scalars())


# ---- servers


def test_every_test_gets_an_empty_database(database):
    with database.engine().begin() as connection:
        connection.execute(CREATE)

        assert connection.execute(NUMBERS).all() == []


@pytest.mark.needs("network")
def test_a_database_survives_the_death_of_its_server(database, counters):
    database.server.kill9()
    with pytest.raises(DBAPIError):
        numbers(counters)

    database.server.restart()

    assert numbers(counters) == [0, 0]


@pytest.mark.needs("network")
def test_a_read_only_server_refuses_the_applications_account(database, counters):
    database.server.read_only(True)
    counters.dispose()

    with pytest.raises(DBAPIError), counters.begin() as connection:
        connection.execute(UPDATE, {"id": 1})

    database.server.read_only(False)
    assert numbers(counters) == [0, 0]


@pytest.mark.needs("network")
def test_a_frozen_server_answers_once_it_thaws(database, counters, eventually):
    database.server.sigstop()

    frozen = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)  # a child that had ended is not collected now
    eventually(lambda: all(process.status() in frozen for process in database.server._tree()))

    database.server.sigcont()
    assert eventually(lambda: numbers(counters)) == [0, 0]


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_redis_keeps_what_it_confirmed_through_a_kill(kind, servers, request):
    server = request.getfixturevalue(f"{kind}_server")
    with server.client() as client:
        client.set("key", "value")

    server.kill9()
    server.restart()

    with server.client() as client:
        assert client.get("key") == b"value"
    assert PASSWORD in server.url


@pytest.mark.servers
def test_no_server_outlives_a_test_run_that_was_killed(eventually):
    program = (
        "import time\nfrom tests.servers import Redis\nprint(Redis().start().process.pid, flush=True)\ntime.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    server = int(run.stdout.readline())

    run.kill()
    run.wait()
    run.stdout.close()

    assert eventually(lambda: is_gone(server))


@pytest.mark.servers
def test_a_server_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(Redis, "command", lambda self: [self.program(), "--no-such-option", "1"])
    server = Redis()

    with pytest.raises(RuntimeError, match="no-such-option"):
        server.start()

    server.stop()


# ---- proxy


@pytest.mark.needs("network")
def test_the_proxy_changes_nothing_when_left_alone(database, counters, proxied):
    proxy = proxied(database)
    through = database.engine(url=proxy.url)

    with through.begin() as connection:
        connection.execute(UPDATE, {"id": 1})

    assert numbers(counters) == [1, 0]
    assert any(statement.startswith(b"UPDATE t") for statement in proxy.statements)


@pytest.mark.needs("network")
def test_a_swallowed_reply_is_a_statement_that_happened(database, counters, proxied):
    proxy = proxied(database)
    through = database.engine(url=proxy.url, isolation_level="AUTOCOMMIT")
    proxy.swallow_reply(rb"^update t .*")

    with through.connect() as connection, pytest.raises(DBAPIError) as fault:
        connection.execute(UPDATE, {"id": 1})

    assert fault.value.connection_invalidated
    assert numbers(counters) == [1, 0]
    assert len(proxy.swallowed) == 1
    with through.connect() as connection:  # the rule was for one statement
        connection.execute(UPDATE, {"id": 1})
    assert numbers(counters) == [2, 0]


@pytest.mark.needs("network")
def test_a_swallowed_commit_is_a_commit(database, counters, proxied):
    proxy = proxied(database)
    through = database.engine(url=proxy.url)
    proxy.swallow_reply(rb"^commit")

    with pytest.raises(DBAPIError), through.begin() as connection:
        connection.execute(UPDATE, {"id": 2})

    assert numbers(counters) == [0, 1]


@pytest.mark.needs("network")
def test_a_swallowed_reply_of_many_rows_ends_the_connection_too(database, counters, proxied):
    proxy = proxied(database)
    with counters.begin() as connection:
        connection.execute(INSERT, [{"id": 3 + i} for i in range(5000)])
    through = database.engine(url=proxy.url)
    proxy.swallow_reply(rb"^select n from t")

    with pytest.raises(DBAPIError):
        numbers(through)

    assert len(numbers(through)) == 5002


@pytest.mark.needs("network")
def test_a_lost_request_is_a_statement_that_did_not_happen(database, counters, proxied):
    proxy = proxied(database)
    through = database.engine(url=proxy.url, isolation_level="AUTOCOMMIT")
    proxy.lose_request(rb"^update t")

    with through.connect() as connection, pytest.raises(DBAPIError):
        connection.execute(UPDATE, {"id": 1})

    assert numbers(counters) == [0, 0]
    assert len(proxy.lost) == 1


def test_a_prepared_statement_is_recognised_by_its_sql(postgresql, proxied):
    proxy = proxied(postgresql)
    through = postgresql.engine(url=proxy.url, isolation_level="AUTOCOMMIT")

    with through.connect() as connection:
        connection.execute(CREATE)
        connection.execute(INSERT, [{"id": 1}])
        for _ in range(10):  # psycopg prepares a statement that it has seen five times
            connection.execute(UPDATE, {"id": 1})
        proxy.swallow_reply(rb"^update t")
        with pytest.raises(DBAPIError):
            connection.execute(UPDATE, {"id": 1})

    assert numbers(through) == [11]


@pytest.mark.needs("network")
def test_a_share_of_the_replies_is_chosen_by_its_seed(database, counters, proxied):
    proxy = proxied(database)
    through = database.engine(url=proxy.url, isolation_level="AUTOCOMMIT")
    proxy.swallow_reply(rb"^update t", times=None, share=0.3, seed=7)
    failed = 0

    for _ in range(40):
        try:
            with through.connect() as connection:
                connection.execute(UPDATE, {"id": 1})
        except DBAPIError:
            failed += 1

    assert numbers(counters) == [40, 0]
    assert failed == len(proxy.swallowed) > 3
    assert failed < 30


@pytest.mark.needs("network")
def test_cut_ends_open_connections_and_takes_new_ones(database, counters, proxied):
    proxy = proxied(database)
    through = database.engine(url=proxy.url)
    with through.connect() as connection:
        connection.execute(NUMBERS)
        proxy.cut()
        with pytest.raises(DBAPIError):
            connection.execute(NUMBERS)

    assert numbers(through) == [0, 0]


@pytest.mark.needs("network")
def test_a_pause_holds_answers_back_until_resume(database, counters, proxied, eventually):
    proxy = proxied(database)
    through = database.engine(url=proxy.url)
    answers = []
    with through.connect() as connection:
        connection.execute(NUMBERS)
        proxy.pause()
        reader = Thread(target=lambda: answers.append(connection.execute(NUMBERS).all()))
        reader.start()
        reader.join(0.3)
        assert reader.is_alive()
        assert answers == []

        proxy.resume()
        reader.join(10)

    assert len(answers) == 1


@pytest.mark.needs("network")
def test_a_server_that_is_down_refuses_until_it_is_up(database, counters, proxied):
    proxy = proxied(database)
    through = database.engine(url=proxy.url)
    proxy.down()
    with pytest.raises(DBAPIError):
        numbers(through)

    proxy.up()

    assert numbers(through) == [0, 0]


@pytest.mark.needs("network")
def test_a_delay_slows_every_request(database, counters, proxied):
    proxy = proxied(database)
    through = database.engine(url=proxy.url)
    with through.connect() as connection:
        connection.execute(NUMBERS)
        proxy.delay(0.2)
        begun = time.monotonic()
        connection.execute(NUMBERS)
        took = time.monotonic() - begun
        proxy.delay(0)

    assert took >= 0.2


# ---- processes

PROGRAM = """
    import os, time
    from celery import Celery
    app = Celery("proj", broker=os.environ["BROKER"])

    @app.task
    def tell(path):
        with open(path, "w") as out:
            out.write(f"{os.getpid()} {time.time()} {time.monotonic()}")
"""


def test_a_real_worker_runs_until_the_test_ends(celery_processes, redis_server, tmp_path, eventually):
    worker = celery_processes.worker(PROGRAM, "-c", "1", env={"BROKER": redis_server.url})
    told = tmp_path / "told"
    subprocess.run(
        [sys.executable, "-c", f"import proj; proj.tell.delay({str(told)!r})"],
        check=True, cwd=tmp_path, env={**os.environ, "BROKER": redis_server.url},
    )  # fmt: skip

    pid = int(eventually(lambda: told.exists() and told.read_text().split())[0])

    assert pid in worker.children()
    worker.kill9()
    assert not worker.running
    eventually(lambda: is_gone(pid))


@pytest.mark.servers
def test_a_worker_with_a_shifted_clock_still_measures_durations_right():
    program = dedent("""
        import time
        begun = time.monotonic(); time.sleep(0.1)
        print(time.time(), time.monotonic() - begun)
    """)
    run = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **shifted_clock("+10m")},
    )

    clock, duration = map(float, run.stdout.split())

    assert 590 < clock - time.time() < 610
    assert 0.1 <= duration < 5


def test_a_process_that_ends_early_shows_its_log(celery_processes):
    with pytest.raises(AssertionError, match="no_such_module"):
        celery_processes.worker("no_such_module")


def test_eventually_says_what_did_not_come_true(eventually):
    with pytest.raises(AssertionError, match=r"the moon did not come true in 0\.1 s; last: 0"):
        eventually(lambda: 0, timeout=0.1, what="the moon")


def test_a_test_may_log_what_no_encoding_has():
    """Under xdist the log travels to another process, which such a character would end."""
    logging.getLogger(__name__).warning("lone \ud800 surrogate")
