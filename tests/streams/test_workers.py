"""Promises of the broker with real workers: long tasks, killed workers, cut connections, warm shutdown."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tests import processes

LEASE, BLOCK = 2.0, 1.0
POOLS = {
    "solo": ("-P", "solo"),
    "threads": ("-P", "threads", "-c", "2"),
    "prefork": ("-P", "prefork", "-c", "2"),
    "gevent": ("-P", "gevent", "-c", "2"),
}
PROGRAM = f"""
import time
import redis
from celery import Celery

app = Celery("streamproj", broker={{broker!r}})
app.conf.task_acks_late = True
app.conf.worker_prefetch_multiplier = 2
app.conf.broker_transport_options = {{{{"lease_timeout": {LEASE}, "block_timeout": {BLOCK}}}}}
notes = redis.Redis.from_url({{notes!r}})

@app.task
def work(number, seconds):
    notes.rpush("started", number)
    time.sleep(seconds)
    notes.rpush("done", number)
"""


class Stage:
    """One app on one server, its workers, and what its tasks noted."""

    def __init__(self, server: Any, folder: Path, started: processes.CeleryProcesses) -> None:
        self.server, self.started = server, started
        # A database of its own: the URL names the broker's, and redis-py lets the URL win over an argument.
        notes = server.url.rpartition("/")[0] + "/2"
        broker = server.url.replace("redis://", "redis-streams://", 1)
        self.module = processes.write_module(folder, PROGRAM.format(broker=broker, notes=notes), "streamproj")
        self.notes = redis.Redis.from_url(notes)

    def worker(self, name: str, *args: str) -> processes.CeleryProcess:
        return self.started.worker(self.module, "-n", f"{name}@test", "-l", "INFO", *args)

    def send(self, *works: tuple[int, float]) -> None:
        from celery import Celery

        with Celery(broker=self.server.url.replace("redis://", "redis-streams://", 1)) as app:
            for work in works:
                app.send_task("streamproj.work", work)

    def noted(self, what: str) -> list[int]:
        return sorted(int(number) for number in self.notes.lrange(what, 0, -1))


@pytest.fixture
def stage(redis_server: Any, tmp_path: Path, celery_processes: processes.CeleryProcesses) -> Stage:
    return Stage(redis_server, tmp_path, celery_processes)


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_a_task_longer_than_the_lease_runs_once_even_when_all_connections_are_cut(
    stage: Stage, pool: str, eventually: Callable[..., Any]
) -> None:
    stage.worker("a", *POOLS[pool])
    stage.worker("b", *POOLS[pool])
    stage.send(*((number, LEASE * 2.5) for number in range(4)))
    eventually(lambda: len(stage.noted("started")) >= 2, timeout=20)

    # The broker's connections only: the tasks' own notes must arrive.
    with stage.server.client() as client:
        for each in client.client_list():
            if each["db"] == "0":
                client.client_kill_filter(_id=each["id"], skipme=True)

    eventually(lambda: stage.noted("done") == [0, 1, 2, 3], timeout=40)
    assert stage.noted("started") == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_a_killed_workers_messages_are_taken_over_in_time(
    stage: Stage, pool: str, eventually: Callable[..., Any]
) -> None:
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
    stage: Stage, eventually: Callable[..., Any]
) -> None:
    first = stage.worker("first", *POOLS["threads"])
    stage.send(*((number, 1.5) for number in range(4)))
    eventually(lambda: len(stage.noted("started")) == 2, timeout=20)
    stage.worker("second", *POOLS["threads"])

    first.terminate()

    eventually(lambda: stage.noted("done") == [0, 1, 2, 3], timeout=20)
    assert stage.noted("started") == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_server_killed_and_restarted_runs_nothing_twice(stage: Stage, eventually: Callable[..., Any]) -> None:
    stage.worker("a", *POOLS["threads"])
    stage.send(*((number, 3.0) for number in range(6)))
    eventually(lambda: len(stage.noted("started")) == 2, timeout=20)

    stage.server.kill9()
    stage.server.start()

    eventually(lambda: stage.noted("done") == [0, 1, 2, 3, 4, 5], timeout=40)
    assert stage.noted("started") == [0, 1, 2, 3, 4, 5]
