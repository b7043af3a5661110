"""The server goes away, becomes a replica, falls silent: workers go on by themselves, and no task is lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from celery import Celery

from tests.processes import CeleryProcess, CeleryProcesses
from tests.proxy import Proxy
from tests.servers import PASSWORD, Redis
from tests.streams.sentinel import watched

PROGRAM = """
import time
import redis
from celery import Celery

app = Celery("failover", broker={broker!r})
app.conf.broker_transport_options = {options!r}
app.conf.task_acks_late = True
app.conf.worker_prefetch_multiplier = {prefetch}
notes = redis.Redis.from_url({notes!r})

@app.task
def work(number, seconds):
    notes.rpush("started", number)
    time.sleep(seconds)
    notes.rpush("done", number)
"""
OPTIONS: dict[str, Any] = {"lease_timeout": 4.0, "block_timeout": 1.0}
#: Servers that are to be found dead within seconds are given seconds to answer.
IMPATIENT = {"health_check_interval": 2.0, "socket_timeout": 3.0, "socket_connect_timeout": 2.0}
PROMPT = {"max_retries": 30, "interval_start": 0.2, "interval_step": 0.2, "interval_max": 1}


class Stage:
    """Workers of one broker; what their tasks did is noted on a server of its own."""

    def __init__(self, notes: Any, folder: Path, started: CeleryProcesses) -> None:
        self.notes_url = f"{notes.url[:-1]}9"
        self.notes = redis.Redis.from_url(self.notes_url)
        self.started = started
        self.broker, self.options = "", dict(OPTIONS)

    def use(self, broker: str, **options: Any) -> None:
        self.broker, self.options = broker, {**self.options, **options}

    def worker(self, name: str, *args: str, prefetch: int = 2) -> CeleryProcess:
        source = PROGRAM.format(broker=self.broker, options=self.options, notes=self.notes_url, prefetch=prefetch)
        return self.started.worker(
            source, "-n", f"{name}@test", *(args or ("-P", "threads", "-c", "2")), name="failover"
        )

    def send(self, *works: tuple[int, float], broker: str | None = None, **arguments: Any) -> None:
        with Celery(broker=broker or self.broker) as app:
            app.conf.broker_transport_options = self.options
            for work in works:
                app.send_task("failover.work", work, **arguments)

    def noted(self, what: str) -> Counter[int]:
        return Counter(int(number) for number in self.notes.lrange(what, 0, -1))


@pytest.fixture
def stage(redis_server: Any, tmp_path: Path, celery_processes: CeleryProcesses) -> Stage:
    return Stage(redis_server, tmp_path, celery_processes)


@pytest.fixture
def broker_server() -> Any:
    server = Redis()
    server.start()
    yield server
    server.stop()


def ours(server: Any, port: int | None = None) -> str:
    return f"redis-streams://:{PASSWORD}@127.0.0.1:{port or server.port}/0"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "freeze"])
def test_a_sentinel_failover_under_load_loses_no_task(stage: Stage, end: str, eventually: Callable[..., Any]) -> None:
    with watched() as sentinels:
        stage.use(sentinels.url, **sentinels.options, **IMPATIENT)
        worker = stage.worker("failover")
        before = range(150)
        stage.send(*((number, 0.1) for number in before))
        eventually(lambda: len(stage.noted("done")) >= 20, timeout=30)
        # What only the master has is lost with it, whoever reads it: Redis replicates after it has answered.
        eventually(sentinels.replicated)

        sentinels.master.kill9() if end == "kill" else sentinels.master.sigstop()
        eventually(sentinels.failed_over, timeout=30)
        after = range(1000, 1050)
        stage.send(*((number, 0.01) for number in after), retry=True, retry_policy=PROMPT)

        eventually(lambda: set(stage.noted("done")) == {*before, *after}, timeout=60)
        assert worker.running
        # Only what was acknowledged in the last moment before the end, or was running then, may run again.
        assert sum(count - 1 for count in stage.noted("done").values()) <= 4 + 10


@pytest.mark.slow
def test_workers_outlive_a_master_that_becomes_a_replica_for_a_while(
    stage: Stage, broker_server: Any, eventually: Callable[..., Any]
) -> None:
    stage.use(ours(broker_server))
    workers = [stage.worker("failover"), stage.worker("other")]
    stage.send((1, 3.0))
    eventually(lambda: stage.noted("started")[1] == 1)

    with broker_server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        begun = time.monotonic()
        with pytest.raises(Exception, match="replica"):
            stage.send((2, 0.0), retry=False)
        for worker in workers:
            worker.wait_for_log("is a replica, which takes no messages")
        eventually(lambda: time.monotonic() - begun > 5)
        client.execute_command("REPLICAOF", "NO", "ONE")
    stage.send(*((number, 0.0) for number in range(10, 14)))

    eventually(lambda: set(stage.noted("done")) == {1, 10, 11, 12, 13}, timeout=10)
    assert all(worker.running for worker in workers)
    assert stage.noted("done")[1] == 1
    eventually(lambda: broker_server_is_empty(broker_server), timeout=10)


def broker_server_is_empty(server: Any) -> bool:
    with server.client() as client:
        return not client.xlen("cs1:{celery}:p0")


@pytest.mark.slow
def test_a_network_that_falls_silent_is_noticed_in_time_and_outlived(
    stage: Stage, broker_server: Any, eventually: Callable[..., Any]
) -> None:
    with Proxy("127.0.0.1", broker_server.port) as proxy:
        # Without gossip and heartbeats nobody but the reader's own watchdog can notice.
        stage.use(ours(broker_server, proxy.port), **{**IMPATIENT, "socket_timeout": 30.0})
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
        worker = stage.worker("failover", "-P", "threads", "-c", "2", *quiet)
        stage.send((1, 0.0), broker=ours(broker_server))
        eventually(lambda: stage.noted("done")[1] == 1)

        proxy.pause()
        silent = time.monotonic()
        worker.wait_for_log("Connection to broker lost", timeout=20)
        noticed = time.monotonic() - silent
        proxy.cut()
        proxy.resume()
        stage.send((2, 0.0), broker=ours(broker_server))

        eventually(lambda: stage.noted("done")[2] == 1, timeout=20)
    watchdog = stage.options["block_timeout"] + stage.options["health_check_interval"]
    assert noticed < watchdog + 2
    assert worker.running


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "prefork", "solo"])
def test_a_worker_stops_in_time_while_the_network_is_silent(
    stage: Stage, broker_server: Any, pool: str, eventually: Callable[..., Any]
) -> None:
    with Proxy("127.0.0.1", broker_server.port) as proxy:
        stage.use(ours(broker_server, proxy.port), **IMPATIENT)
        worker = stage.worker("silent", "-P", pool, "-c", "2")
        stage.send((1, 0.0), broker=ours(broker_server))
        eventually(lambda: stage.noted("done")[1] == 1)

        proxy.pause()
        began = time.monotonic()
        worker.terminate(timeout=60)

    # The commands of the way out, each of which is given up after socket_timeout.
    assert time.monotonic() - began < 8 * IMPATIENT["socket_timeout"]
    stage.use(ours(broker_server))
    stage.worker("heir")
    stage.send((2, 0.0))
    eventually(lambda: stage.noted("done")[2] == 1, timeout=20)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("fault", ["idle connections are closed", "all connections are cut"])
def test_a_connection_that_dies_while_the_prefetch_is_full_costs_nothing(
    stage: Stage, broker_server: Any, fault: str, eventually: Callable[..., Any]
) -> None:
    long = 12.0
    with Proxy("127.0.0.1", broker_server.port) as proxy, broker_server.client() as client:
        if fault == "idle connections are closed":
            client.config_set("timeout", "2")
        stage.use(ours(broker_server, proxy.port))
        worker = stage.worker("failover", "-P", "threads", "-c", "1", prefetch=1)
        stage.send((1, long), (2, 0.0), broker=ours(broker_server))
        eventually(lambda: stage.noted("started")[1] == 1)

        process = psutil.Process(worker.pid)
        begun, used = time.monotonic(), sum(process.cpu_times()[:2])
        if fault == "all connections are cut":
            proxy.cut()
        eventually(lambda: stage.noted("done")[1] == 1, timeout=long + 5)
        ended = time.monotonic()
        share = (sum(process.cpu_times()[:2]) - used) / (ended - begun)
        eventually(lambda: stage.noted("started")[2] == 1, timeout=10)

        assert time.monotonic() - ended < 3
        assert share < 0.1
        assert stage.noted("started")[1] == 1
