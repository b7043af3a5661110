"""What a Celery user knows of workers and beat holds: warm shutdown in each pool, beat, -B, time limits."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_claim import Status
from tests.acceptance.stage import Stage
from tests.conftest import Database
from tests.processes import eventually


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent"])
def test_a_warm_shutdown_finishes_the_row_at_work_and_hands_the_others_back_at_once(
    mariadb: Database, stage: Callable[..., Stage], pool: str
) -> None:
    show = stage(mariadb, lease_seconds=600, batch_size=10)
    show.add(range(1, 11), work="sleep 2")
    worker = show.worker("-c", "1", "-P", pool)
    show.send()
    show.started(1)
    asked_at = time.monotonic()

    assert worker.terminate() == 0, worker.log()

    assert time.monotonic() - asked_at < 12
    ended = set(show.starts())
    states = show.column("status")
    assert {number for number, state in states.items() if state == Status.SUCCEEDED} == ended
    assert set(states.values()) == {Status.SUCCEEDED, Status.PENDING}
    assert len(ended) <= 2, "rows were started after the worker was asked to stop"
    assert set(show.column("reclaim_count").values()) == {0}
    assert {token for number, token in show.column("claim_token").items() if number not in ended} == {None}
    assert {claim_time for number, claim_time in show.column("claim_time").items() if number not in ended} == {None}
    assert len(show.happened("end")) == len(ended)
    assert "Traceback" not in worker.log()


@pytest.mark.slow
def test_a_window_under_beat_sends_for_its_consumers_and_they_share_the_rows(
    database: Database, stage: Callable[..., Stage]
) -> None:
    """Stock beat with its PersistentScheduler; two workers, four consumers wherever a process is free."""
    window = {"frequency": 1.0, "max_run_time": 0.5, "concurrency": 4, "run_type": "any"}
    show = stage(database, batch_size=3, window=window)
    show.add(range(1, 61), work="sleep 0.05")
    workers = [show.worker("-c", "2", ready=False), show.worker("-c", "2").wait_ready()]
    workers[0].wait_ready()
    show.beat()

    assert show.ended(60) == {Status.SUCCEEDED: 60}
    assert set(show.starts().values()) == {1}
    owners = {each["worker"] for each in show.happened("start")}
    assert {owner.rsplit("-", 1)[1] for owner in owners} == {"c0", "c1", "c2", "c3"}
    assert {owner.split("@")[0] for owner in owners} == {"w1", "w2"}
    show.add(range(61, 64))  # the next window finds new rows
    assert show.ended(63) == {Status.SUCCEEDED: 63}


@pytest.mark.slow
def test_a_worker_with_an_embedded_beat_is_enough(sqlite: Database, stage: Callable[..., Stage]) -> None:
    show = stage(sqlite, window={"frequency": 1.0, "concurrency": 1})
    show.add(range(1, 6))

    show.worker("-c", "1", "-B")

    assert show.ended(5) == {Status.SUCCEEDED: 5}
    assert set(show.starts().values()) == {1}


@pytest.mark.slow
def test_the_queue_of_windows_is_consumed_whatever_queues_a_worker_is_given(
    mariadb: Database, stage: Callable[..., Stage]
) -> None:
    show = stage(mariadb, window={"frequency": 1.0, "concurrency": 1, "queue": "mails"})
    show.add(range(1, 6))

    show.worker("-c", "1", "-Q", "mails")
    show.beat()

    assert show.ended(5) == {Status.SUCCEEDED: 5}


@pytest.mark.slow
def test_a_soft_time_limit_counts_the_row_that_overran(mariadb: Database, stage: Callable[..., Stage]) -> None:
    show = stage(mariadb, lease_seconds=600, soft_time_limit=2)
    show.add([1, 2], work="sleep 30")
    show.worker("-c", "1")
    show.send()
    show.started(1)

    eventually(lambda: show.states() == {Status.PENDING: 2}, timeout=10)

    assert show.starts() == {1: 1}
    assert set(show.column("retry_count").values()) == {0}
    assert show.column("reclaim_count") == {1: 1, 2: 0}
    with show.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE job SET work = ''")
    assert show.driven(2) == {Status.SUCCEEDED: 2}


@pytest.mark.slow
def test_a_hard_time_limit_loses_no_row(mariadb: Database, stage: Callable[..., Stage]) -> None:
    """Celery asks the pool process to end before it kills it, and the process gives its rows back."""
    show = stage(mariadb, lease_seconds=2, time_limit=2)
    show.add([1, 2], work="sleep 30")
    show.worker("-c", "1")
    show.send()
    show.started(1)

    eventually(lambda: show.states() == {Status.PENDING: 2}, timeout=15)

    assert show.starts() == {1: 1}
    with show.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE job SET work = ''")
    assert show.driven(2) == {Status.SUCCEEDED: 2}


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["soft_time_limit", "time_limit"])
def test_a_row_that_overruns_its_time_limit_each_time_does_not_hold_up_the_others(
    mariadb: Database, stage: Callable[..., Stage], limit: str
) -> None:
    show = stage(mariadb, lease_seconds=2, max_reclaims=1, batch_size=1, **{limit: 1})
    show.add([1], work="sleep 30")
    show.add(range(2, 6))
    show.worker("-c", "1")

    assert show.driven(5, timeout=20) == {Status.SUCCEEDED: 4, Status.FAILED: 1}


@pytest.mark.slow
def test_rows_that_kill_their_worker_each_time_fail_in_the_end(mariadb: Database, stage: Callable[..., Stage]) -> None:
    """A poison row must not take the workers down for ever; the rows beside it are done."""
    show = stage(mariadb, lease_seconds=2, max_reclaims=1, batch_size=1)
    show.add([1], work="die")
    show.add(range(2, 6))
    show.worker("-c", "1")

    assert show.driven(5) == {Status.SUCCEEDED: 4, Status.FAILED: 1}

    poison = show.row(1)
    assert poison.status == Status.FAILED
    assert "lost 2 owners in a row" in poison.error_message
    assert show.starts()[1] == 2
