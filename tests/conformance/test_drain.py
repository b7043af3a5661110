"""A run from its start to its end: limits, stops, and databases that go away."""

from __future__ import annotations

import threading
import time

import pytest
from sqlalchemy import create_engine, make_url

from celery_claim import Status
from celery_claim.claims.renew import _renewed
from celery_claim.exceptions import AccessDenied, DatabaseUnavailable
from tests.servers import PASSWORD


def test_a_drain_works_until_nothing_is_claimable(queue):
    def handler(row):
        mail.handled.append(row.id)
        if row.id == 25:
            mail.insert([100, 101])

    mail = queue(handler, rows=25, batch_size=10)

    counts = mail.task.drain()

    assert mail.handled == [*range(1, 26), 100, 101]
    assert (counts.claimed, counts.succeeded, counts.released) == (27, 27, 0)
    assert counts.seconds > 0


@pytest.mark.parametrize("limit", [0, 1, 20, 33])
def test_a_drain_claims_no_more_rows_than_its_limit(queue, limit):
    mail = queue(rows=50, batch_size=20)

    counts = mail.task.drain(limit=limit)

    assert (counts.claimed, counts.succeeded, counts.released) == (limit, limit, 0)
    assert len(mail.keys(Status.PENDING)) == 50 - limit


def test_a_drain_starts_no_row_after_its_time_and_gives_back_what_it_holds(queue):
    started: list[float] = []

    def handler(row):
        started.append(time.monotonic())
        time.sleep(0.3)

    mail = queue(handler, rows=20)
    begun = time.monotonic()

    counts = mail.task.drain(max_run_time=1.0)

    assert all(moment - begun < 1.1 for moment in started)
    assert counts.succeeded == len(started) < 20
    assert mail.keys(Status.PROCESSING) == []


def test_a_batch_is_no_larger_than_fits_into_the_time_that_is_left(queue):
    def handler(row):
        time.sleep(0.05)

    mail = queue(handler, rows=200, batch_size=50)

    first = mail.task.drain(max_run_time=1.0)
    second = mail.task.drain(max_run_time=1.0)

    # Rows that are claimed only to be given back cost everybody two statements; a slow moment may make it one.
    assert first.released + second.released <= 4
    assert first.succeeded > 3
    assert mail.keys(Status.PROCESSING) == []


def test_a_drain_without_rows_returns_at_once(queue):
    mail = queue()
    mail.task.drain()
    begun = time.monotonic()

    assert mail.task.drain(max_run_time=30).claimed == 0
    assert time.monotonic() - begun < 2


def test_a_stopping_worker_finishes_its_row_and_gives_the_others_back(queue, monkeypatch):
    stopping = threading.Event()
    monkeypatch.setattr("celery_claim.tasks.claim_task.worker_is_stopping", stopping.is_set)

    def handler(row):
        mail.handled.append(row.id)
        if row.id == 3:
            stopping.set()

    mail = queue(handler, rows=10)

    counts = mail.task.drain()

    assert mail.handled == [1, 2, 3]
    assert (counts.succeeded, counts.released) == (3, 7)
    assert mail.keys(Status.PENDING) == [4, 5, 6, 7, 8, 9, 10]
    assert mail.row(4).reclaim_count == 0


def test_a_handler_knows_the_window_it_runs_in(queue):
    seen: list[object] = []

    def handler(self, row):
        seen.append((self.window.deadline > time.monotonic(), self.window.consumer_id, self.window.should_stop()))

    mail = queue(handler, rows=1, bind=True)
    mail.task(claim={"consumer_id": 3, "consumers": 4, "max_run_time": 60})

    assert seen == [(True, 3, False)]
    assert mail.task.window is None


def test_consumers_of_a_window_share_its_rows(queue):
    mail = queue(rows=300, batch_size=10)
    runs = [{"consumer_id": number, "consumers": 3, "max_run_time": 60} for number in range(3)]
    counts: list[dict[str, object]] = []
    threads = [threading.Thread(target=lambda run=run: counts.append(mail.task(claim=run))) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts.append(mail.task(claim={}))

    assert sorted(mail.handled) == mail.keys() == mail.keys(Status.SUCCEEDED)
    assert sum(count["succeeded"] for count in counts) == 300


def test_one_consumer_with_an_offset_leaves_no_row_behind(queue):
    mail = queue(rows=95, batch_size=10)

    mail.task(claim={"consumer_id": 7, "ordinal": 7, "consumers": 8, "max_run_time": 60})

    assert mail.keys(Status.SUCCEEDED) == mail.keys()


# ---- databases in trouble


@pytest.mark.slow
@pytest.mark.needs("network")
def test_a_read_only_server_fails_no_row(queue, database):
    mail = queue(rows=3, max_retries=1)
    mail.task.drain(limit=1)
    database.server.read_only(True)
    with pytest.raises(DatabaseUnavailable):
        mail.task.drain()
    database.server.read_only(False)

    assert mail.task.drain().succeeded == 2
    assert mail.handled == [1, 2, 3]


@pytest.mark.needs("network")
def test_a_server_that_turns_read_only_while_a_row_is_processed_gets_its_result_later(queue, database):
    writable_again = threading.Timer(1.0, lambda: database.server.read_only(False))

    def handler(row):
        mail.handled.append(row.id)
        if row.id == 2:
            database.server.read_only(True)
            writable_again.start()

    mail = queue(handler, rows=4)
    counts = mail.task.drain()
    writable_again.join()

    assert (counts.succeeded, counts.failed, counts.lost) == (4, 0, 0)
    assert mail.handled == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.needs("network")
def test_a_server_that_dies_and_comes_back_while_a_row_is_processed_loses_nothing(queue, database):
    restarted = threading.Event()

    def restart():
        database.server.kill9()
        database.server.restart()
        restarted.set()

    def handler(row):
        mail.handled.append(row.id)
        if row.id == 3:
            restart()

    mail = queue(handler, rows=6, batch_size=4)
    counts = mail.task.drain()

    assert restarted.is_set()
    assert (counts.succeeded, counts.failed, counts.lost) == (6, 0, 0)
    assert mail.handled == [1, 2, 3, 4, 5, 6]
    assert mail.keys(Status.SUCCEEDED) == mail.keys()


@pytest.mark.needs("network")
def test_a_database_that_is_down_is_an_error_without_the_password(queue, database, proxied):
    proxy = proxied(database)
    mail = queue(rows=1, url=proxy.url)
    proxy.down()

    with pytest.raises(DatabaseUnavailable) as raised:
        mail.task.drain()

    assert PASSWORD not in str(raised.value)
    proxy.up()
    assert mail.task.drain().succeeded == 1


@pytest.mark.needs("network")
def test_a_wrong_password_is_told_as_such_and_not_shown(queue, database):
    mail = queue(rows=1, url=database.url.replace(PASSWORD, "wr0ng-secret"))

    with pytest.raises(AccessDenied) as raised:
        mail.task.drain()

    assert "wr0ng-secret" not in str(raised.value)
    assert [finding.code for finding in mail.task.check()] == ["access-denied"]


@pytest.mark.needs("network")
def test_a_worker_that_cannot_reach_its_table_says_so_in_its_result(queue, database, proxied):
    proxy = proxied(database)
    mail = queue(rows=1, url=proxy.url)
    proxy.down()
    mail.task.push_request(called_directly=False, is_eager=False)

    assert mail.task()["error"]
    proxy.up()
    assert mail.task()["succeeded"] == 1


@pytest.mark.needs("network")
def test_idle_connections_that_the_server_closed_are_replaced_silently(queue, database, proxied):
    proxy = proxied(database)

    def handler(row):
        mail.handled.append(row.id)
        proxy.cut()

    mail = queue(handler, rows=3, url=proxy.url)
    counts = mail.task.drain()

    assert (counts.succeeded, counts.lost) == (3, 0)
    assert mail.handled == [1, 2, 3]


# ---- what is left open


def open_transactions(database):
    """Transactions of this test's database that the server knows of."""
    if database.can("mysql"):
        return database.admin(
            "SELECT t.trx_id FROM information_schema.innodb_trx t JOIN information_schema.processlist p "
            f"ON p.id = t.trx_mysql_thread_id WHERE p.db = '{database.schema}'"
        )
    return database.admin(
        f"SELECT pid FROM pg_stat_activity WHERE datname = '{database.schema}' AND xact_start IS NOT NULL "
        "AND pid <> pg_backend_pid()"
    )


@pytest.mark.needs("network")
@pytest.mark.parametrize("write_back", ["row", "batch"])
def test_no_transaction_is_open_while_a_handler_runs_or_when_the_run_is_over(queue, database, write_back):
    seen: list[object] = []
    mail = queue(lambda row: seen.extend(open_transactions(database)), rows=3, write_back=write_back)

    mail.task.drain()
    mail.task.recover()
    mail.task.status()

    assert seen == []
    assert open_transactions(database) == []


@pytest.mark.needs("network")
def test_a_run_that_saw_an_empty_table_sees_rows_that_come_later(queue, database):
    mail = queue()
    with mail.claims.linked() as link:
        assert link.execute(mail.statements.candidates, {"limit": 5, "offset": 0}).all() == []
        mail.insert(2)

        assert len(link.execute(mail.statements.candidates, {"limit": 5, "offset": 0}).all()) == 2


# ---- sessions


@pytest.mark.needs("time_zone")
@pytest.mark.parametrize("zone", ["+13:00", "-11:00"])
def test_no_lease_depends_on_the_time_zone_of_a_session(queue, database, zone):
    options = {"connect_args": {"init_command": f"SET time_zone = '{zone}'"}}
    if not database.can("mysql"):
        options = {"connect_args": {"options": f"-c timezone=UTC{zone.replace(':', '')[:3]}"}}
    mail = queue(rows=2)
    abroad = queue(model=mail.model)
    abroad.app.conf.claim_database_engine_options = options
    abroad.claim(limit=1, lease_seconds=60)
    mail.claim(limit=1, lease_seconds=60)

    assert mail.task.recover() == abroad.task.recover() == []
    assert abs(mail.row(1).claim_time - mail.row(2).claim_time) <= 2
    assert abs(mail.row(1).claim_time - time.time()) < 5
    mail.age(62)
    assert abroad.task.recover() == [1, 2]


@pytest.mark.needs("isolation")
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_the_servers_own_isolation_level_changes_nothing(queue, database, level):
    if database.can("mysql"):
        (before,) = database.admin("SELECT @@GLOBAL.tx_isolation")[0]
        database.admin(f"SET GLOBAL TRANSACTION ISOLATION LEVEL {level}")
    else:
        database.admin(f"ALTER DATABASE \"{database.schema}\" SET default_transaction_isolation = '{level.lower()}'")
    try:
        mail = queue(rows=200, batch_size=9)
        threads = [threading.Thread(target=mail.task.drain) for _ in range(3)]
        for thread in threads:
            thread.start()
        # Whoever adds rows meanwhile is not kept waiting.
        begun = time.monotonic()
        mail.insert(range(1000, 1020))
        assert time.monotonic() - begun < 4
        for thread in threads:
            thread.join()
        mail.task.drain()
    finally:
        if database.can("mysql"):
            database.admin(f"SET GLOBAL TRANSACTION ISOLATION LEVEL {before.replace('-', ' ')}")

    assert sorted(mail.handled) == mail.keys() == mail.keys(Status.SUCCEEDED)


@pytest.mark.needs("mysql")
def test_driver_row_counts_of_changed_rows_only_are_understood(queue, database):
    """PyMySQL without FOUND_ROWS: a renewal within the same second changes nothing, and the row is still ours."""
    pymysql = pytest.importorskip("pymysql")
    url = make_url(database.url)

    def connect():
        place = {"host": url.host, "port": url.port, "user": url.username, "password": url.password}
        return pymysql.connect(**place, database=url.database)

    mail = queue(rows=5, engine=create_engine(url.set(drivername="mysql+pymysql"), creator=connect))
    claimed = mail.claim()

    with mail.claims.linked() as link:
        for _ in range(3):
            assert _renewed(link, mail.statements, claimed.token, [1, 2, 3, 4, 5]) == []
    assert mail.write_back(claimed).lost == []
    assert mail.keys(Status.SUCCEEDED) == [1, 2, 3, 4, 5]
