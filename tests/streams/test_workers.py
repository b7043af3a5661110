"""Promises of the broker with real workers: long tasks, killed workers, cut connections, warm shutdown."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from tests.processes import CeleryProcess, is_gone, shifted_clock
from tests.streams.stage import BLOCK, LEASE, POOLS, Stage

TERMINATE = """
app.conf.broker_transport_options["on_lease_lost"] = "terminate"
"""


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_a_task_longer_than_the_lease_runs_once_even_when_all_connections_are_cut(
    stage_anywhere: Stage, pool: str, eventually: Callable[..., Any]
) -> None:
    stage = stage_anywhere
    stage.worker("a", *POOLS[pool])
    stage.worker("b", *POOLS[pool])
    stage.send(*((number, LEASE * 2.5) for number in range(4)))
    eventually(lambda: len(stage.noted("started")) >= 2, timeout=20)

    stage.cut_connections()

    eventually(lambda: stage.noted("done") == [0, 1, 2, 3], timeout=40)
    assert stage.noted("started") == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_a_killed_workers_messages_are_taken_over_in_time(
    stage_anywhere: Stage, pool: str, eventually: Callable[..., Any]
) -> None:
    stage = stage_anywhere
    victim = stage.worker("victim", *POOLS[pool])
    stage.send(*((number, 30.0) for number in range(2)))
    eventually(lambda: len(stage.noted("started")) >= 1, timeout=20)
    # Without a free prefetch of its own, this worker could not take anything over.
    heir = stage.worker("heir", *POOLS["threads"][:-1], "8")
    # Past its own grace, so that the bound begins with the kill.
    heir.wait_ready()
    before = len(stage.noted("started"))

    killed = time.monotonic()
    victim.kill9()

    eventually(lambda: len(stage.noted("started")) >= before + 2, timeout=LEASE * 1.25 + BLOCK + 10)
    assert time.monotonic() - killed <= max(LEASE * 1.25 + BLOCK, LEASE * 0.5 + LEASE * 1.25) + 1
    assert set(stage.noted("started")) == {0, 1}


@pytest.mark.slow
def test_a_warm_shutdown_hands_unstarted_messages_to_the_next_worker(
    stage_anywhere: Stage, eventually: Callable[..., Any]
) -> None:
    stage = stage_anywhere
    first = stage.worker("first", *POOLS["threads"])
    stage.send(*((number, 1.5) for number in range(4)))
    eventually(lambda: len(stage.noted("started")) == 2, timeout=20)
    stage.worker("second", *POOLS["threads"])

    first.terminate()

    eventually(lambda: stage.noted("done") == [0, 1, 2, 3], timeout=20)
    assert stage.noted("started") == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_server_killed_and_restarted_runs_nothing_twice(
    stage_anywhere: Stage, eventually: Callable[..., Any]
) -> None:
    stage = stage_anywhere
    stage.worker("a", *POOLS["threads"])
    stage.send(*((number, 3.0) for number in range(6)))
    eventually(lambda: len(stage.noted("started")) == 2, timeout=20)

    stage.server.kill9()
    stage.server.start()

    eventually(lambda: stage.noted("done") == [0, 1, 2, 3, 4, 5], timeout=40)
    assert stage.noted("started") == [0, 1, 2, 3, 4, 5]


def task_in_a_pipe(stage: Stage, eventually: Callable[..., Any]) -> tuple[CeleryProcess, int]:
    """A worker that has sent its pool's one process a task, and that process, which is stopped and has not read it."""
    worker = stage.worker("first", "-P", "prefork", "-c", "1")
    child = worker.children()[0]
    os.kill(child, signal.SIGSTOP)
    stage.send((1, 0.0))
    eventually(stage.held, timeout=20)
    # Once the worker answers, it has written to the pipe what its loop took up before the question.
    eventually(lambda: stage.app.control.ping(["first@test"], timeout=1), timeout=20)
    return worker, child


@pytest.mark.slow
def test_a_task_on_its_way_to_a_pool_process_is_not_run_by_another_worker_when_the_connection_breaks(
    make_stage: Callable[..., Stage], eventually: Callable[..., Any]
) -> None:
    stage = make_stage()
    _, child = task_in_a_pipe(stage, eventually)
    stage.worker("second", "-P", "prefork", "-c", "1")
    owner = stage.held()[0].consumer

    stage.cut_connections()

    # Renewed since then, more than once, by the one that had it before.
    for _ in range(3):
        eventually(lambda: stage.held()[0].idle > 200)
        eventually(lambda: stage.held()[0].idle < 100, timeout=LEASE)
    assert [entry.consumer for entry in stage.held()] == [owner]

    os.kill(child, signal.SIGCONT)

    eventually(lambda: stage.noted("done") and not stage.held(), timeout=20)
    assert stage.noted("started") == [1]


@pytest.mark.slow
def test_a_task_on_its_way_to_a_pool_process_that_dies_with_the_connection_is_run_once(
    make_stage: Callable[..., Stage], eventually: Callable[..., Any]
) -> None:
    stage = make_stage()
    worker, child = task_in_a_pipe(stage, eventually)

    # In this order, so that the main process finds both at once.
    worker.stop_signal(signal.SIGSTOP, whole_group=False)
    stage.cut_connections()
    os.kill(child, signal.SIGKILL)
    worker.stop_signal(signal.SIGCONT, whole_group=False)

    eventually(lambda: stage.noted("done") == [1] and not stage.held(), timeout=30)
    assert stage.noted("started") == [1]


@pytest.mark.slow
def test_a_task_that_the_broker_held_sees_its_eta_and_is_not_held_again(
    make_stage: Callable[..., Stage], eventually: Callable[..., Any]
) -> None:
    stage = make_stage("""
        @app.task(bind=True)
        def tell(self):
            notes.set("eta", self.request.eta or "")
    """)
    # A worker whose clock is an hour behind: it would wait for an hour if it looked at the ETA.
    stage.started.worker(stage.module, *POOLS["solo"], "-n", "late@test", env=shifted_clock("-1h"))
    eta = datetime.now(timezone.utc) + timedelta(seconds=1.5)

    stage.app.send_task("streamproj.tell", eta=eta)

    eventually(lambda: stage.notes.exists("eta"), timeout=10)
    assert datetime.fromisoformat(stage.notes.get("eta").decode()) == eta


@pytest.mark.slow
@pytest.mark.parametrize("on_lease_lost", ["log", "terminate"])
def test_a_worker_that_was_frozen_notices_that_it_lost_its_task(
    make_stage: Callable[..., Stage], on_lease_lost: str, eventually: Callable[..., Any]
) -> None:
    stage = make_stage(more=TERMINATE if on_lease_lost == "terminate" else "")
    frozen = stage.worker("frozen", "-P", "prefork", "-c", "1")
    result = stage.app.send_task("streamproj.work", (1, LEASE * 4))
    eventually(lambda: stage.noted("started") == [1], timeout=20)
    heir = stage.worker("heir", "-P", "prefork", "-c", "1")
    heir.wait_ready()

    # The main process alone: its pool works on, and nobody renews.
    frozen.stop_signal(signal.SIGSTOP, whole_group=False)
    eventually(lambda: stage.noted("started") == [1, 1], timeout=LEASE * 1.5 + BLOCK + 10)
    child = frozen.children()[0]
    os.kill(frozen.pid, signal.SIGCONT)

    frozen.wait_for_log("was lost: another worker may run it")
    if on_lease_lost == "terminate":
        eventually(lambda: is_gone(child))
        assert stage.noted("done") == []
    eventually(lambda: stage.noted("done") == ([1] if on_lease_lost == "terminate" else [1, 1]), timeout=LEASE * 4 + 10)
    assert result.get(timeout=10) is None
    assert result.state == "SUCCESS"
    # Told of once, though leases are renewed every half second; and both go on to work.
    assert frozen.log().count("was lost: another worker may run it") == 1
    stage.send(*((number, 0.5) for number in range(2, 6)))
    eventually(lambda: {2, 3, 4, 5} <= set(stage.noted("done")), timeout=20)
    assert frozen.running


@pytest.mark.slow
def test_ending_tasks_needs_a_pool_of_processes(
    make_stage: Callable[..., Stage], eventually: Callable[..., Any]
) -> None:
    stage = make_stage(more=TERMINATE)
    worker = stage.started.start("worker", stage.module, *POOLS["threads"], ready=False)

    eventually(lambda: not worker.running, timeout=30)

    assert worker.process.returncode == 78
    assert "'on_lease_lost' is 'terminate', which needs `celery worker -P prefork`" in worker.log()
