"""Celery's own commands on redis-streams://, unchanged: one real worker answers them all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from tests import processes
from tests.conftest import _get
from tests.processes import REPOSITORY, eventually
from tests.servers import Servers

PROGRAM = """
import time
import redis
from celery import Celery

app = Celery("toolproj", broker={broker!r}, backend={backend!r})
app.conf.task_acks_late = True
app.conf.worker_prefetch_multiplier = 1
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {{"block_timeout": 1}}
app.conf.beat_schedule = {{"tick": {{"task": "toolproj.tick", "schedule": 0.5}}}}
notes = redis.Redis.from_url({notes!r})

@app.task
def work(number, seconds=0.0):
    notes.rpush("started", number)
    time.sleep(seconds)
    notes.rpush("done", number)
    return number

@app.task
def tick():
    notes.incr("ticks")
"""
Eventually = Callable[..., Any]


class Tools:
    """`celery -A toolproj COMMAND` beside a worker."""

    def __init__(self, server: Any, folder: Path) -> None:
        base = server.url.rpartition("/")[0]
        self.server, self.folder = server, folder
        self.stock = f"{base}/0"
        self.broker = self.stock.replace("redis://", "redis-streams://", 1)
        self.backend, self.notes_url = f"{base}/3", f"{base}/2"
        source = PROGRAM.format(broker=self.broker, backend=self.backend, notes=self.notes_url)
        self.module = processes.write_module(folder, source, "toolproj")
        self.notes = redis.Redis.from_url(self.notes_url)
        self.app = Celery("toolproj", broker=self.broker, backend=self.backend, set_as_current=False)
        self.started = processes.CeleryProcesses(folder)

    def popen(self, *arguments: str, app: bool = True) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("CELERY", "PYTEST"))}
        env = {**clean, "PYTHONPATH": f"{self.folder}:{REPOSITORY}", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "celery", *(("-A", self.module) if app else ()), *arguments]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __call__(self, *arguments: str, app: bool = True, code: int = 0, stdin: str = "") -> str:
        process = self.popen(*arguments, app=app)
        try:
            out, err = process.communicate(stdin, timeout=60)
        finally:
            process.kill()
        assert process.returncode == code, out + err
        return out + err

    def inspect(self, *arguments: str) -> Any:
        """What the one worker answers."""
        answer = json.loads(self("inspect", "--json", *arguments).splitlines()[0])
        assert list(answer) == ["w@test"]
        return answer["w@test"]

    def control(self, *arguments: str) -> str:
        return self("control", *arguments)

    def send(self, number: int, seconds: float = 0.0, **options: Any) -> Any:
        return self.app.send_task("toolproj.work", (number, seconds), **options)

    def noted(self, what: str) -> list[int]:
        return [int(number) for number in self.notes.lrange(what, 0, -1)]

    def close(self) -> None:
        self.started.close()
        self.app.close()
        self.notes.close()


@pytest.fixture(scope="module")
def stand(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    server = _get(servers, "redis")
    with contextlib.closing(server.client()) as client:
        client.flushall()
    tools = Tools(server, tmp_path_factory.mktemp("tools"))
    tools.started.worker(tools.module, "-P", "prefork", "--autoscale=6,2", "-n", "w@test", "-E", "-l", "INFO")
    yield tools
    tools.close()


@pytest.fixture
def tools(stand: Tools) -> Tools:
    """The worker with nothing to do."""
    stand.app.control.purge()
    eventually(lambda: not any(stand.app.control.inspect(timeout=1).active().values()), timeout=30)
    stand.notes.flushdb()
    return stand


pytestmark = [pytest.mark.slow, pytest.mark.servers]


def test_inspect_tells_of_the_worker_and_its_tasks(tools: Tools) -> None:
    running, waiting = [tools.send(number, 25) for number in range(2)], [tools.send(number) for number in (2, 3)]
    later = tools.send(4, countdown=0.8)
    eventually(lambda: len(tools.noted("started")) >= 2)
    assert tools.inspect("query_task", running[0].id)[running[0].id][0] == "active"

    assert tools.inspect("ping") == {"ok": "pong"}
    assert "w@test" in tools("status")
    stats = tools.inspect("stats")
    assert stats["broker"]["transport"] == "redis-streams"
    assert stats["pool"]["max-concurrency"] >= 2
    active = tools.inspect("active")
    assert {each["id"] for each in active} >= {result.id for result in running}
    assert [queue["name"] for queue in tools.inspect("active_queues")] == ["celery"]
    assert "toolproj.work" in tools.inspect("registered")
    assert isinstance(tools.inspect("reserved"), list)
    assert isinstance(tools.inspect("scheduled"), list)
    assert [result.get(timeout=60) for result in (*running, *waiting, later)] == [0, 1, 2, 3, 4]


def test_a_control_command_from_a_process_that_dies_leaves_no_reply_queue(tools: Tools) -> None:
    process = tools.popen("inspect", "ping", "--timeout", "30")
    with contextlib.closing(tools.server.client()) as client:
        eventually(lambda: [key for key in client.keys("cs1:{*reply*") if client.pttl(key) != -2], timeout=20)
        process.kill()
        process.communicate(timeout=10)

        left = [key for key in client.keys("cs1:{*reply*") if client.pttl(key) == -1]

    assert left == []


def test_queues_are_added_and_cancelled_at_run_time(tools: Tools) -> None:
    tools.control("add_consumer", "extra")
    assert tools.send(1, queue="extra").get(timeout=20) == 1

    tools.control("cancel_consumer", "extra")
    eventually(lambda: [queue["name"] for queue in tools.inspect("active_queues")] == ["celery"])
    unread = tools.send(2, queue="extra")
    assert tools.send(3).get(timeout=20) == 3
    assert unread.state == "PENDING"
    assert "extra" in tools("claim", "streams")


def test_the_pool_grows_and_shrinks_and_is_scaled(tools: Tools) -> None:
    # Of its own: an autoscaler takes back what is grown by hand.
    worker = tools.started.worker(tools.module, "-P", "prefork", "-c", "1", "-n", "grown@test", "-Q", "grown")

    def size() -> int:
        answer = tools.app.control.inspect(["grown@test"], timeout=2).stats()
        return len(answer["grown@test"]["pool"]["processes"])

    try:
        tools.control("pool_grow", "2", "-d", "grown@test")
        eventually(lambda: size() == 3)
        tools.control("pool_shrink", "2", "-d", "grown@test")
        eventually(lambda: size() == 1)
        assert tools.send(0, queue="grown").get(timeout=20) == 0
        tools.notes.flushdb()
    finally:
        assert worker.terminate() == 0
    tools.control("autoscale", "5", "2", "-d", "w@test")

    results = [tools.send(number, 1.0) for number in range(5)]

    assert sorted(result.get(timeout=30) for result in results) == list(range(5))
    assert sorted(tools.noted("started")) == list(range(5))


def test_rate_limits_hold_and_are_taken_back(tools: Tools) -> None:
    tools.control("rate_limit", "toolproj.work", "30/m")
    try:
        begun = time.monotonic()
        results = [tools.send(number) for number in range(4)]
        assert sorted(result.get(timeout=30) for result in results) == list(range(4))
        assert time.monotonic() - begun > 5
    finally:
        tools.control("rate_limit", "toolproj.work", "0")
    assert tools.send(9).get(timeout=20) == 9


def test_time_limits_are_set_and_end_a_task(tools: Tools) -> None:
    # Celery's worker keeps the old ones until it connects again, on every broker; a message's own hold at once.
    assert "time limits set successfully" in tools.control("time_limit", "toolproj.work", "600", "900")

    with pytest.raises(Exception, match="SoftTimeLimitExceeded"):
        tools.send(1, 30, soft_time_limit=1).get(timeout=20)
    with pytest.raises(Exception, match="TimeLimitExceeded"):
        tools.send(2, 30, time_limit=2).get(timeout=20)
    assert tools.send(3).get(timeout=20) == 3
    assert tools.noted("started") == [1, 2, 3]


def test_a_revoked_task_does_not_start_and_a_running_one_is_terminated(tools: Tools) -> None:
    running = tools.send(1, 60)
    eventually(lambda: tools.noted("started") == [1])
    held = tools.send(2, countdown=2)
    tools.control("revoke", held.id)

    tools.control("terminate", "SIGKILL", running.id)

    for revoked in (running, held):
        with pytest.raises(Exception, match=r"revoked|terminated"):
            revoked.get(timeout=20)
    assert tools.noted("done") == []
    assert tools.send(3).get(timeout=20) == 3
    assert tools.noted("started") == [1, 3]


def test_a_cancelled_delayed_task_stays_cancelled_whatever_the_workers_remember(tools: Tools) -> None:
    held = tools.send(1, countdown=3)
    kept = tools.send(2, countdown=3)

    assert "cancelled" in tools("claim", "delayed", "celery", "--cancel", held.id)

    assert kept.get(timeout=20) == 2
    assert tools.noted("started") == [2]


def test_events_are_dumped(tools: Tools) -> None:
    process = tools.popen("events", "--dump")
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not any("task succeeded" in line for line in lines):
            if len(lines) < 2 or "heartbeat" in lines[-1]:
                tools.send(1)
            lines.append(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=10)
    assert any("task received" in line for line in lines)


def test_purge_amqp_report_and_bindings(tools: Tools) -> None:
    assert "Exchange" in tools("list", "bindings")
    assert "redis-streams" in tools("report")
    for number in range(3):
        tools.send(number, queue="unread")
    assert "Purged 3 messages" in tools("purge", "-f", "-Q", "unread")
    assert "No messages purged" in tools("purge", "-f", "-Q", "unread")

    shell = "exchange.declare shelf direct\nqueue.declare shelf\nqueue.bind shelf shelf shelf\n"
    _amqp(tools, shell)
    _amqp(tools, "basic.publish hello shelf shelf\n")
    assert "hello" in _amqp(tools, "basic.get shelf\n")
    assert re.search(r"\b1\b", _amqp(tools, "queue.purge shelf\n"))
    assert "ok" in _amqp(tools, "queue.delete shelf\n").lower()


def _amqp(tools: Tools, script: str) -> str:
    """The shell of `celery amqp`, one command after the other."""
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", tools.module, "amqp", "repl"],
        env={**os.environ, "PYTHONPATH": f"{tools.folder}:{REPOSITORY}"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        return process.communicate(script, timeout=60)[0]
    finally:
        process.kill()


def test_messages_migrate_from_redis_and_back(tools: Tools) -> None:
    with Celery("toolproj", broker=tools.stock, set_as_current=False) as old:
        for number in range(20):
            old.send_task("toolproj.work", (number,), queue="moved", countdown=3600 if number == 0 else None)
        tools("migrate", tools.stock, tools.broker, "-Q", "moved", "--timeout", "3", "-a")
        assert old.connection().default_channel.client.llen("moved") == 0
        facts = json.loads(tools("claim", "streams", "moved", "--json"))[0]
        assert (facts["ready"], facts["delayed"]) == (19, 1)

        tools("migrate", tools.broker, tools.stock, "-Q", "moved", "--timeout", "3", "-a")

        assert old.connection().default_channel.client.llen("moved") == 19
        facts = json.loads(tools("claim", "streams", "moved", "--json"))[0]
        assert (facts["ready"], facts["pending"]) == (0, 0)
        with contextlib.closing(tools.server.client()) as client:
            client.delete("moved", "_kombu.binding.moved")


def test_embedded_beat_sends_its_tasks(tools: Tools) -> None:
    schedule = str(tools.folder / "schedule")
    worker = tools.started.worker(tools.module, "-P", "threads", "-c", "2", "-n", "b@test", "-B", "-s", schedule)
    try:
        eventually(lambda: int(tools.notes.get("ticks") or 0) >= 3, timeout=20)
    finally:
        assert worker.terminate() == 0


def test_the_other_pools_answer_too(tools: Tools) -> None:
    for pool in ("solo", "gevent", "threads"):
        worker = tools.started.worker(tools.module, "-P", pool, "-n", f"{pool}@test")
        try:
            assert "pong" in tools("inspect", "ping", "-d", f"{pool}@test")
            tools("control", "add_consumer", f"only-{pool}", "-d", f"{pool}@test")
            assert tools.send(1, queue=f"only-{pool}").get(timeout=20) == 1
        finally:
            assert worker.terminate() == 0


def test_the_worker_is_shut_down_from_afar(tools: Tools) -> None:
    worker = tools.started.worker(tools.module, "-P", "threads", "-n", "gone@test")

    # It goes without an answer, on every broker.
    assert "No nodes replied" in tools("control", "shutdown", "-d", "gone@test", code=69)

    assert worker.process.wait(20) == 0
