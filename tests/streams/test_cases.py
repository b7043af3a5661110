"""Faults that people reported of brokers on Redis, as real workers would meet them; the numbers are the cases'."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import chord, group
from kombu import Connection

from celery_claim import bulk
from celery_claim.streams.append import QueueFull
from tests import processes
from tests.streams.stage import BLOCK, LEASE, POOLS, Stage
from tests.streams.test_broker import QUEUE, Worker, publish

Eventually = Callable[..., Any]
Connect = Callable[..., Connection]
MakeStage = Callable[..., Stage]


def broker_keys(server: Any) -> set[bytes]:
    with server.client() as client:
        return set(client.keys("*"))


def entries(server: Any, queue: str = "celery") -> tuple[int, int]:
    """Entries of a queue's streams, and how many of them are pending."""
    with server.client() as client:
        streams = client.keys(f"*{{{queue}}}:p*")
        pending = sum(client.xpending(key, "celery")["pending"] for key in streams if client.xinfo_groups(key))
        return sum(client.xlen(key) for key in streams), pending


# ---- C36: the worker reconnects and consumes again --------------------------------------------------------------


@pytest.mark.slow
def test_c36_after_every_outage_the_same_worker_goes_on_and_running_tasks_end_once(
    stage: Stage, eventually: Eventually
) -> None:
    worker = stage.worker("a", *POOLS["threads"])
    worker.wait_ready()
    pid = worker.pid

    def restart_the_server() -> None:
        stage.server.kill9()
        stage.server.start()

    for round_, outage in enumerate((restart_the_server, stage.cut_connections) * 2):
        # Busy in every second round, with a task that the outage falls into.
        busy = round_ >= 2
        if busy:
            stage.send((100 + round_, 3.0))
            eventually(lambda: 100 + round_ in stage.noted("started"))  # noqa: B023
        outage()
        eventually(lambda: stage.send((round_, 0.0)) or True, timeout=10)  # noqa: B023
        eventually(lambda: round_ in stage.noted("done"), timeout=10 + 3 * busy)  # noqa: B023

    eventually(lambda: {102, 103} <= set(stage.noted("done")))
    started = stage.noted("started")
    assert [started.count(number) for number in (102, 103)] == [1, 1]
    assert worker.pid == pid
    assert worker.running


# ---- C40: pending entries without a message ---------------------------------------------------------------------


def test_c40_pending_entries_whose_message_was_deleted_are_dropped_with_a_warning(
    server: Any, connect: Connect, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    publish(connect(), 1, 2, 3)
    with server.client() as client:
        stream = "cs1:{work}:p0"
        client.xgroup_create(stream, "celery", "0")
        ((_, taken),) = client.xreadgroup("celery", "gone", {stream: ">"})
        client.xdel(stream, *(id_ for id_, _ in taken[:2]))
    publish(connect(), 4, 5, 6, 7, 8)
    worker = Worker(connect(lease_timeout=0.6))

    assert sorted(worker.read(10, until=6)) == [3, 4, 5, 6, 7, 8]
    for message in worker.got:
        message.ack()

    eventually(lambda: entries(server, QUEUE) == (0, 0))
    warned = [record for record in caplog.records if "has no message any more" in record.getMessage()]
    assert len(warned) == 2


# ---- C41: a limit refuses, and drops nothing --------------------------------------------------------------------


def test_c41_what_was_refused_and_what_was_kept_add_up(server: Any, connect: Connect) -> None:
    connection, refused = connect(max_length=100), 0
    for number in range(150):
        try:
            publish(connection, number)
        except QueueFull:
            refused += 1

    assert refused == 50
    assert sorted(Worker(connect()).read(10, until=100)) == list(range(100))


# ---- C42: nothing stays behind ----------------------------------------------------------------------------------

ENDS = """
    from celery.exceptions import Reject

    @app.task(acks_late=True)
    def fail(number):
        raise ValueError(number)

    @app.task(acks_late=True)
    def reject(number):
        raise Reject("no", requeue=False)
"""


@pytest.mark.slow
def test_c42_after_every_kind_of_end_the_server_is_empty(make_stage: MakeStage, eventually: Eventually) -> None:
    stage = make_stage(ENDS)
    first = stage.worker("a", *POOLS["threads"])
    stage.worker("b", *POOLS["prefork"])
    first.wait_ready()
    stage.send((0, 0.0))
    eventually(lambda: stage.noted("done") == [0], timeout=20)
    before = broker_keys(stage.server)

    bulk(stage.work, range(1, 4001))
    for number in range(200):
        stage.app.send_task("streamproj.fail", (number,))
        stage.app.send_task("streamproj.work", (number + 5000, 0), expires=datetime.now(timezone.utc) - timedelta(1))
    revoked = [stage.app.send_task("streamproj.work", (9000, 0), countdown=2).id for _ in range(50)]
    stage.app.control.revoke(revoked)

    eventually(lambda: len(stage.noted("done")) == 4001, timeout=60)
    eventually(lambda: entries(stage.server) == (0, 0), timeout=30)
    with stage.server.client() as client:
        ours = [key for key in client.keys("*") if key.startswith(b"cs1:")]
        assert sum(client.memory_usage(key) or 0 for key in ours) < 1_000_000
        dead = client.xlen("cs1:{celery}:dead")
    assert dead == 0
    # The streams of the delayed messages may come and go.
    assert len(broker_keys(stage.server) - before) <= 2
    assert 9000 not in stage.noted("started")


# ---- C43: consumers that are gone -------------------------------------------------------------------------------


def test_c43_names_of_gone_consumers_are_removed_and_their_messages_are_not(server: Any, connect: Connect) -> None:
    for number in range(30):
        publish(connect(), number)
        with server.client() as client:
            if number == 0:
                client.xgroup_create("cs1:{work}:p0", "celery", "0")
            # A worker that took its message, was killed, and was followed by one of another name.
            client.xreadgroup("celery", f"gone-{number}", {"cs1:{work}:p0": ">"}, count=1)

    worker = Worker(connect(lease_timeout=0.5, consumer_reap_after=1.0))
    assert sorted(worker.read(10, until=30)) == list(range(30))
    for message in worker.got:
        message.ack()
    # The names go with the next look, when they hold nothing.
    end = time.monotonic() + 10
    while len(names := consumers(server)) > 3 and time.monotonic() < end:
        worker.read(0.2)

    assert len(names) <= 3


def consumers(server: Any) -> list[str]:
    with server.client() as client:
        return [each["name"].decode() for each in client.xinfo_consumers("cs1:{work}:p0", "celery")]


# ---- C45: a task that is longer than the lease ------------------------------------------------------------------


@pytest.mark.slow
def test_c45_while_its_owner_lives_a_message_is_renewed_and_counted_once(stage: Stage, eventually: Eventually) -> None:
    for name in "abc":
        stage.worker(name, *POOLS["threads"]).wait_ready()
    stage.send((1, LEASE * 4))
    eventually(lambda: stage.noted("started") == [1])
    seen = []
    with stage.server.client() as client:
        while not stage.noted("done"):
            seen += client.xpending_range("cs1:{celery}:p0", "celery", "-", "+", 10)
            time.sleep(0.1)

    assert stage.noted("started") == [1]
    assert {each["times_delivered"] for each in seen} == {1}
    assert max(each["time_since_delivered"] for each in seen) < LEASE * 1000


# ---- C46: an idle or broken connection must not make a busy loop --------------------------------------------------

WATCHED_SECONDS = 6.0


def main_cpu(worker: Any) -> float:
    """Seconds of CPU that the worker's main process has used."""
    times = psutil.Process(worker.pid).cpu_times()
    return float(times.user + times.system)


@pytest.mark.slow
@pytest.mark.alone
def test_c46_an_idle_worker_is_quiet(make_stage: MakeStage) -> None:
    stage = make_stage("app.conf.broker_transport_options = {}")
    worker = stage.worker("idle", *POOLS["threads"]).wait_ready()
    with stage.server.client() as client:
        # What its start needs is over when it waits for tasks.
        processes.eventually(lambda: [each for each in client.client_list() if each["cmd"] == "xreadgroup"])
        commands, cpu, began = client.info()["total_commands_processed"], main_cpu(worker), time.monotonic()
        # This time is what is measured.
        time.sleep(WATCHED_SECONDS)
        commands = client.info()["total_commands_processed"] - commands
        seconds = time.monotonic() - began

    # Those inside the scripts are counted too, and Celery's own heartbeat.
    assert commands / seconds <= 5
    assert (main_cpu(worker) - cpu) / seconds < 0.02


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("cut_by", ["timeout", "kill"])
def test_c46_connections_that_end_while_the_prefetch_is_full_cost_no_cpu(
    stage: Stage, cut_by: str, eventually: Eventually
) -> None:
    worker = stage.worker("full", "-P", "threads", "-c", "1", "--prefetch-multiplier", "1").wait_ready()
    stage.send((1, WATCHED_SECONDS), (2, 0.0))
    eventually(lambda: stage.noted("started") == [1])
    cpu, began = main_cpu(worker), time.monotonic()
    with stage.server.client() as client:
        if cut_by == "timeout":
            client.config_set("timeout", 1)
        try:
            while stage.noted("done") == []:
                if cut_by == "kill" and 1 < time.monotonic() - began < 3:
                    client.client_kill_filter(_type="normal", skipme=True)
                time.sleep(0.5)
        finally:
            client.config_set("timeout", 0)
    ended = time.monotonic()

    eventually(lambda: stage.noted("done") == [1, 2], timeout=10)
    assert time.monotonic() - ended < 3
    assert (main_cpu(worker) - cpu) / (ended - began) < 0.15
    assert stage.noted("started") == [1, 2]


# ---- C47: a countdown that is longer than the lease -------------------------------------------------------------


@pytest.mark.slow
def test_c47_delayed_tasks_run_once_when_due_whatever_becomes_of_workers(
    stage_anywhere: Stage, eventually: Eventually
) -> None:
    stage = stage_anywhere
    workers = [stage.worker(name, *POOLS["threads"]) for name in "abc"]
    for worker in workers:
        worker.wait_ready()
    sent, due = time.monotonic(), LEASE * 3
    stage.send(*((number, 0.0) for number in range(10)), countdown=due)
    stage.send((100, 0.0), eta=datetime.now(timezone.utc) - timedelta(hours=1))
    stage.send((101, 0.0), eta=datetime.now(timezone.utc) + timedelta(days=3650))
    eventually(lambda: stage.noted("done") == [100])

    workers[0].terminate()
    workers[1].kill9()

    assert stage.noted("done") == [100]
    eventually(lambda: len(stage.noted("done")) == 11, timeout=due + LEASE + BLOCK + 10)
    assert time.monotonic() - sent >= due - 0.1
    assert stage.noted("started") == [*range(10), 100]


# ---- C48: very many tasks with an ETA ---------------------------------------------------------------------------


@pytest.mark.slow
def test_c48_delayed_tasks_cost_workers_nothing_and_hold_nobody_up(stage: Stage, eventually: Eventually) -> None:
    workers = [stage.worker(name, *POOLS["prefork"]) for name in "ab"]
    for worker in workers:
        worker.wait_ready()
    before = [psutil.Process(worker.pid).memory_info().rss for worker in workers]
    bulk(stage.work, range(20_000), countdown=3600)

    stage.send(*((number, 0.0) for number in range(10)))

    eventually(lambda: stage.noted("done") == list(range(10)), timeout=10)
    after = [psutil.Process(worker.pid).memory_info().rss for worker in workers]
    assert max(late - early for early, late in zip(before, after, strict=True)) < 100_000_000
    workers[0].kill9()
    with stage.server.client() as client:
        assert client.zcard("cs1:{celery}:eta") == 20_000


# ---- C51: a task that kills its worker --------------------------------------------------------------------------

DEADLY = """
import signal

app.conf.broker_transport_options["delivery_limit"] = 3

@app.task
def kills_everything():
    notes.rpush("killed", 1)
    os.killpg(os.getpgid(0), signal.SIGKILL)
"""


@pytest.mark.slow
def test_c51_a_task_that_kills_whole_workers_is_given_up_and_its_count_survives_the_server(
    make_stage: MakeStage, eventually: Eventually
) -> None:
    stage = make_stage(DEADLY)
    poison = stage.app.send_task("streamproj.kills_everything")
    stage.send(*((number, 0.0) for number in range(20)))
    for life in range(3):
        worker = stage.started.start(
            "worker", stage.module, *POOLS["prefork"], "-n", f"life{life}@test", ready=False
        )  # fmt: skip
        eventually(lambda worker=worker: not worker.running, timeout=40)
        if life == 1:
            stage.server.kill9()
            stage.server.restart()
    stage.worker("survivor", *POOLS["prefork"])

    eventually(lambda: poison.state == "FAILURE", timeout=30)

    assert stage.notes.llen("killed") == 3
    eventually(lambda: set(stage.noted("done")) == set(range(20)), timeout=20)
    eventually(lambda: entries(stage.server) == (0, 0))


# ---- C52: hard time limits ---------------------------------------------------------------------------------------

LIMITED = """
app.conf.broker_transport_options["delivery_limit"] = 3

@app.task(time_limit=1, acks_on_failure_or_timeout={acks})
def hangs():
    notes.rpush("hung", time.time())
    time.sleep(30)
"""


@pytest.mark.slow
def test_c52_a_task_over_its_hard_limit_fails_once(make_stage: MakeStage, eventually: Eventually) -> None:
    stage = make_stage(LIMITED.format(acks=True))
    stage.worker("limited", *POOLS["prefork"])
    result = stage.app.send_task("streamproj.hangs")

    eventually(lambda: result.state == "FAILURE", timeout=30)

    assert "TimeLimitExceeded" in repr(result.result)
    eventually(lambda: entries(stage.server) == (0, 0))
    assert stage.notes.llen("hung") == 1


@pytest.mark.slow
def test_c52_one_that_is_not_acknowledged_then_comes_again_up_to_the_delivery_limit(
    make_stage: MakeStage, eventually: Eventually
) -> None:
    stage = make_stage(LIMITED.format(acks=False))
    stage.worker("limited", *POOLS["prefork"])
    result = stage.app.send_task("streamproj.hangs")

    eventually(lambda: stage.server.client().xlen("cs1:{celery}:dead") == 1, timeout=60)

    starts = [float(each) for each in stage.notes.lrange("hung", 0, -1)]
    assert len(starts) == 3
    assert all(later - earlier >= 1 for earlier, later in pairwise(starts))
    assert entries(stage.server) == (0, 0)
    eventually(lambda: result.state == "FAILURE")


# ---- C53: priorities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "expected"), [("redis", [0, 3, 6, 9]), ("amqp", [9, 6, 3, 0])])
def test_c53_priorities_follow_the_documented_direction_in_order_of_sending(
    connect: Connect, order: str, expected: list[int]
) -> None:
    connection = connect(priority_order=order)
    for turn in range(5):
        for priority in (6, 0, 9, 3):
            publish(connection, [priority, turn], priority=priority)
    worker = Worker(connect(priority_order=order), prefetch=1)
    got: list[Any] = []
    while len(got) < 20:
        worker.got.clear()
        got += worker.read(5, until=1)
        worker.got[0].ack()

    assert got == [[priority, turn] for priority in expected for turn in range(5)]


@pytest.mark.parametrize(("given", "step"), [(50, 9), (-1, 0), ("5", 3), (None, 0)])
def test_c53_a_priority_out_of_range_goes_to_its_own_end(server: Any, connect: Connect, given: Any, step: int) -> None:
    publish(connect(), 1, priority=given)

    with server.client() as client:
        assert client.xlen(f"cs1:{{work}}:p{step}") == 1


# ---- C55: revokes are forgotten ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_c55_a_revoked_task_with_an_eta_does_not_run_after_the_worker_that_knew_of_it_was_killed(
    stage: Stage, eventually: Eventually
) -> None:
    first = stage.worker("first", *POOLS["threads"])
    second = stage.worker("second", *POOLS["threads"])
    task = stage.app.send_task("streamproj.work", (7, 0), countdown=4)
    stage.app.control.revoke(task.id)
    for worker in (first, second):
        worker.wait_for_log(f"Tasks flagged as revoked: {task.id}")

    first.kill9()

    second.wait_for_log(f"Discarding revoked task: streamproj.work[{task.id}]", timeout=20)
    assert stage.noted("started") == []
    eventually(lambda: entries(stage.server) == (0, 0))


# ---- C56: canvas over a killed worker ---------------------------------------------------------------------------

SUMS = """
    @app.task(acks_late=True)
    def add(x, y, seconds=0):
        notes.rpush("parts", x)
        time.sleep(seconds)
        return x + y

    @app.task(acks_late=True)
    def total(numbers):
        notes.rpush("totals", sum(numbers))
        return sum(numbers)
"""


@pytest.mark.slow
def test_c56_a_chord_survives_the_death_of_a_worker_and_a_large_group_is_whole(
    make_stage_anywhere: MakeStage, eventually: Eventually
) -> None:
    stage = make_stage_anywhere(SUMS)
    victim = stage.worker("a", *POOLS["threads"])
    victim.wait_ready()

    def add(*args: Any) -> Any:
        return stage.app.signature("streamproj.add", args)

    result = chord(add(number, number, 1.0) for number in range(6))(stage.app.signature("streamproj.total"))
    eventually(lambda: stage.notes.llen("parts") >= 1)
    stage.worker("b", *POOLS["threads"]).wait_ready()
    victim.kill9()

    assert result.get(timeout=30) == 30
    assert stage.notes.lrange("totals", 0, -1) == [b"30"]
    many = group(add(number, 1) for number in range(300)).apply_async()
    assert many.get(timeout=60) == [number + 1 for number in range(300)]


# ---- C63: children and the broker's sockets ---------------------------------------------------------------------

SENDS = """
    @app.task
    def parent(number):
        notes.rpush("parents", number)
        work.delay(number)
"""


@pytest.mark.slow
def test_c63_children_that_are_replaced_share_no_socket_with_their_parent(
    make_stage: MakeStage, eventually: Eventually
) -> None:
    stage = make_stage(SENDS)
    worker = stage.worker("a", "-P", "prefork", "-c", "2", "--max-tasks-per-child", "1")
    worker.wait_ready()
    for number in range(40):
        stage.app.send_task("streamproj.parent", (number,))

    shared: set[str] = set()
    while len(stage.noted("done")) < 40:
        assert stage.app.control.inspect(timeout=5).ping()
        shared |= in_use(worker.pid) & set().union(*(in_use(pid) for pid in worker.children()))
        assert worker.running, worker.log()

    assert stage.noted("done") == list(range(40))
    assert shared == set()
    assert "Traceback" not in worker.log()


def in_use(pid: int) -> set[str]:
    """The TCP sockets that a process has open to a server of ours, by inode."""
    inodes = set()
    try:
        connected = {
            f"socket:[{line.split()[9]}]" for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        }
        for name in os.listdir(f"/proc/{pid}/fd"):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    except OSError:
        # It has ended meanwhile.
        return set()
    return inodes & connected
