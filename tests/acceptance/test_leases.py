"""A row has one owner: however long its work takes, whoever dies, whatever a clock says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from celery_claim import Status
from tests.acceptance.stage import Stage
from tests.conftest import Database
from tests.processes import eventually, shifted_clock

#: Consumers are sent for so often, in seconds.
POLL = 1.0
WINDOW = {"frequency": POLL, "concurrency": 2}
#: After its lease a row is taken back by the next maintenance and claimed in the next window; whole seconds of the
#: database's clock and a busy machine add one more each.
LATE = 1 + 2 * POLL + 1


def make_quick(show: Stage) -> None:
    """Rows that are claimed from now on take no time."""
    with show.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE job SET work = ''")


@pytest.mark.slow
def test_a_live_worker_keeps_its_row_beyond_the_lease_and_a_dead_one_loses_it_soon_after(
    mariadb: Database, stage: Callable[..., Stage]
) -> None:
    """C02, with a lease of 3 s and a row that lasts longer than the test looks."""
    lease = 3
    show = stage(mariadb, lease_seconds=lease, window=WINDOW)
    show.add([1], work="sleep 60")
    workers = [show.worker("-c", "2"), show.worker("-c", "2")]
    show.beat()

    first = show.started(1)
    eventually(lambda: time.monotonic() > first["at"] + 2 * lease, timeout=20)
    assert show.starts() == {1: 1}, "the lease was not renewed while the handler worked"

    owner = next(worker for worker in workers if first["pid"] in worker.children())
    owner.kill9()
    killed_at = time.monotonic()
    make_quick(show)
    second = show.started(1, times=2)

    # The last renewal was up to a third of the lease before the kill.
    assert lease * 2 / 3 - 1 <= second["at"] - killed_at <= lease + LATE
    assert show.ended(1) == {Status.SUCCEEDED: 1}
    assert show.row(1).reclaim_count == 1
    assert show.starts() == {1: 2}


@pytest.mark.slow
def test_a_task_with_a_short_lease_takes_no_row_of_one_with_a_long_lease(
    mariadb: Database, stage: Callable[..., Stage]
) -> None:
    """C03, first half: two programs with different leases on one table; rows are judged by their own."""
    long = stage(mariadb, lease_seconds=30, batch_size=1)
    long.add([1], work="sleep 8")
    long.worker("-c", "1", "-Q", "long")
    # Only its own queue's worker takes this row; then the one with the short lease is let loose.
    long.send(queue="long")
    first = long.started(1)
    long.processes._started[-1].stop_signal(signal.SIGSTOP)
    frozen_at = time.monotonic()
    short = stage(mariadb, lease_seconds=2, window=WINDOW)
    short.worker("-c", "1")
    short.beat()

    # Silent for three of the other's leases, and well inside its own.
    eventually(lambda: time.monotonic() > frozen_at + 6, timeout=15)
    long.processes._started[0].stop_signal(signal.SIGCONT)

    assert long.ended(1) == {Status.SUCCEEDED: 1}
    assert long.starts() == {1: 1}
    assert long.row(1).claim_token == first["token"]


@pytest.mark.slow
def test_without_a_lease_rows_of_dead_workers_stay_claimed_and_delayed_ones_still_run(
    mariadb: Database, stage: Callable[..., Stage]
) -> None:
    """C03, second half: lease_seconds=None."""
    show = stage(mariadb, lease_seconds=None, window=WINDOW, batch_size=1)
    show.add([1], work="sleep 60")
    dead = show.worker("-c", "1")
    show.beat()
    show.started(1)
    dead.kill9()
    [(now,)] = mariadb.admin("SELECT UNIX_TIMESTAMP()")
    added_at = time.monotonic()
    show.add([2], status=Status.RETRYING, next_retry_time=int(now) + 2)
    show.worker("-c", "1")

    second = show.started(2)

    assert 1 <= second["at"] - added_at <= 2 + LATE + 3  # a worker takes a moment to start
    eventually(lambda: show.row(2).status == Status.SUCCEEDED)
    assert show.row(1).status == Status.PROCESSING
    assert show.starts() == {1: 1, 2: 1}
    assert "stuck" in show.command("claim", "status").stdout


@pytest.mark.slow
def test_rows_in_flight_come_back_once_when_a_whole_worker_is_killed(
    database: Database, stage: Callable[..., Stage]
) -> None:
    """C05, with a lease of 3 s and rows of 4 s."""
    lease = 3
    show = stage(database, lease_seconds=lease, window=WINDOW, batch_size=1)
    show.add(range(1, 11), work="sleep 4")
    worker = show.worker("-c", "2")
    show.beat()
    in_flight = eventually(lambda: set(show.starts()) if len(show.starts()) == 2 else None, timeout=20)
    worker.kill9()
    killed_at = time.monotonic()
    make_quick(show)
    show.worker("-c", "2")
    ready_at = time.monotonic()

    assert show.ended(10) == {Status.SUCCEEDED: 10}
    again = [each for each in show.happened("start") if each["reclaims"] == 1]
    assert {each["id"] for each in again} == in_flight
    # Not before the lease is over, and soon after that and the start of the new worker.
    assert min(each["at"] for each in again) - killed_at >= lease * 2 / 3 - 1
    assert max(each["at"] for each in again) <= max(killed_at + lease, ready_at) + LATE
    reclaims = show.column("reclaim_count")
    assert {number for number, count in reclaims.items() if count == 1} == in_flight
    assert sum(reclaims.values()) == 2
    assert sum(show.starts().values()) == 12


@pytest.mark.slow
@pytest.mark.parametrize("max_reclaims", [0, 3])
def test_a_late_finisher_never_changes_what_the_table_says(
    mariadb: Database, stage: Callable[..., Stage], max_reclaims: int
) -> None:
    """C06: renewal ends where a worker is frozen. With no reclaims left the row fails, else its new owner decides."""
    show = stage(mariadb, lease_seconds=2, max_reclaims=max_reclaims, window=WINDOW, batch_size=1)
    show.add([1], work="sleep 2")
    late = show.worker("-c", "1")
    show.beat()
    show.started(1)
    late.stop_signal(signal.SIGSTOP)
    show.worker("-c", "1")
    ended = show.ended(1)
    decided = show.row(1)

    late.stop_signal(signal.SIGCONT)
    eventually(lambda: len(show.happened("lost")) == 1)

    assert show.row(1) == decided
    assert ended == ({Status.FAILED: 1} if max_reclaims == 0 else {Status.SUCCEEDED: 1})
    assert "no longer ours" in late.log()
    assert show.starts()[1] == (1 if max_reclaims == 0 else 2)


@pytest.mark.slow
def test_workers_with_wrong_clocks_take_nothing_early_and_write_the_databases_time(
    mariadb: Database, stage: Callable[..., Stage]
) -> None:
    """C07, with a row of 8 s, a lease of 60 s, and clocks 10 minutes fast and slow; also a row due in 5 s."""
    show = stage(mariadb, lease_seconds=60, window=WINDOW, batch_size=1)
    show.add([1], work="sleep 8")
    show.worker("-c", "1")
    show.send()
    show.started(1)
    fast = show.worker("-c", "1", "-Q", "celery,fast", env=shifted_clock("+10m"), ready=False)
    slow = show.worker("-c", "1", "-Q", "celery,slow", env=shifted_clock("-10m")).wait_ready()
    fast.wait_ready()
    [(now,)] = mariadb.admin("SELECT UNIX_TIMESTAMP()")
    added_at = time.monotonic()
    show.add([2], status=Status.RETRYING, next_retry_time=int(now) + 5)
    show.add(range(3, 33), work="sleep 0.1")
    show.beat()

    assert show.ended(32) == {Status.SUCCEEDED: 32}
    for number, queue in ((33, "fast"), (34, "slow")):  # at least one row for each
        show.add([number])
        show.send(queue=queue)
    assert show.ended(34) == {Status.SUCCEEDED: 34}
    assert set(show.starts().values()) == {1}
    # Due times and the database's clock are whole seconds.
    assert 4 <= show.started(2)["at"] - added_at <= 5 + LATE
    assert sum(show.column("reclaim_count").values()) == 0
    [(now,)] = mariadb.admin("SELECT UNIX_TIMESTAMP()")
    passed = time.monotonic() - added_at
    times = show.column("claim_time")
    for each in show.happened("start"):
        if each["id"] > 1:
            true_time = int(now) - (passed - (each["at"] - added_at))
            assert abs(times[each["id"]] - true_time) < 2, each
    assert "clock" in fast.log() and "clock" in slow.log()


@pytest.mark.slow
def test_a_frozen_worker_starts_none_of_the_rows_it_claimed_before(
    mariadb: Database, stage: Callable[..., Stage]
) -> None:
    """A worker that was stopped for longer than its lease goes on with the row it was in, and leaves the others."""
    show = stage(mariadb, lease_seconds=2, window=WINDOW, batch_size=5)
    show.add(range(1, 6), work="sleep 0.5")
    frozen = show.worker("-c", "1")
    show.beat()
    show.send()
    pid = show.started(1)["pid"]
    frozen.stop_signal(signal.SIGSTOP)
    before = set(show.starts())
    show.worker("-c", "1")
    assert show.ended(5) == {Status.SUCCEEDED: 5}

    frozen.stop_signal(signal.SIGCONT)
    eventually(lambda: show.happened("lost"))

    by_frozen = {each["id"] for each in show.happened("start") if each["pid"] == pid}
    assert by_frozen == before
    assert os.path.exists(f"/proc/{pid}")
