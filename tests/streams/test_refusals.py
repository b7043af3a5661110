"""What cannot work is said at once, in a sentence with the remedy and without the password; nothing is lost by it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Queue

from celery_claim.exceptions import ConfigurationError
from celery_claim.streams.options import CONNECTION_RULES, RULES, StreamOptions, read_options
from celery_claim.transport.refuse import NEEDED, WELCOME
from tests.servers import PASSWORD, Redis, Redis62, free_port

PROGRAM = """
from celery import Celery

app = Celery("refused", broker={broker!r})
app.conf.broker_transport_options = {options!r}
app.conf.task_acks_late = True
app.conf.worker_prefetch_multiplier = 2
app.conf.broker_connection_retry_on_startup = True

@app.task
def work(number):
    print(f"worked on {{number}}", flush=True)
"""
OPTIONS: dict[str, Any] = {"block_timeout": 0.5, "lease_timeout": 4.0}


def program(broker: str, **options: Any) -> str:
    return PROGRAM.format(broker=broker, options={**OPTIONS, **options})


def ours(server: Any, who: str = f":{PASSWORD}") -> str:
    return f"redis-streams://{who}@127.0.0.1:{server.port}/0"


@pytest.fixture(autouse=True)
def _a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process remembers of servers that worked, and of warnings that it gave."""
    monkeypatch.setattr("celery_claim.transport.refuse._used", set())
    monkeypatch.setattr("celery_claim.streams.options._told", set())


@pytest.fixture
def ends(celery_processes: Any) -> Callable[[str], str]:
    """ends(broker url) -> the log of a worker that refused to start, which says no password."""

    def run(broker: str) -> str:
        worker = celery_processes.worker(program(broker), "-P", "solo", name="refused", ready=False)
        code, log = worker.process.wait(60), str(worker.log())
        assert code not in (0, None), log
        assert PASSWORD not in log and "wr0ng" not in log
        return log

    return run


@pytest.fixture
def started() -> Iterator[Callable[[Any], Any]]:
    """started(server): started now, stopped with the test."""
    servers: list[Any] = []

    def start(server: Any) -> Any:
        servers.append(server)
        return server.start()

    yield start
    for server in servers[::-1]:
        server.stop()


# ---- options --------------------------------------------------------------------------------------------------

NUMBERS = ("fast", None, True, -1, float("nan"), float("inf"), [1])
WRONG: dict[str, tuple[Any, ...]] = {
    **{name: NUMBERS for name in RULES if isinstance(getattr(StreamOptions(), name), float)},
    **{name: (*NUMBERS, 1.5) for name in RULES if type(getattr(StreamOptions(), name)) is int},
    "lease_renew_interval": (0, "1", True, 40.0),
    "recovery_grace": (-1, "1", True),
    "recovery_interval": (0, "1", True),
    "on_lease_lost": ("kill", None, True),
    "max_length": (0, "10", True, 1.5),
    "delayed_delivery": ("yes", 1, None),
    "priority_steps": ([], [0, 0], [-1], [0.5], "0369", 3, None, [True]),
    "group": ("", None, 3),
    "priority_order": ("up", None, 0),
    "queue_order_strategy": ("random", None, 1),
    "global_keyprefix": (None, 1, "{tag}"),
    "socket_timeout": (0, "5"),
    "socket_connect_timeout": (0, "5"),
    "socket_keepalive": ("on",),
    "socket_keepalive_options": ([1],),
    "client_name": ("two words", "line\nbreak", 3),
    "username": (3, ""),
    "credential_provider": (3,),
    "max_connections": (0, "5"),
    "master_name": (3, ""),
    "min_other_sentinels": (-1, None),
    "ssl": ("yes",),
}


def test_every_option_has_a_default_and_a_check() -> None:
    assert {field.name for field in dataclasses.fields(StreamOptions)} == set(RULES)
    assert set(WRONG) | {"password", "sentinel_kwargs"} == set(RULES) | set(CONNECTION_RULES)
    assert read_options(dataclasses.asdict(StreamOptions())) == StreamOptions()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_option_is_refused_with_its_name_its_value_and_what_is_expected(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_options({name: value})

    said = str(refused.value)
    assert repr(name) in said
    assert " is " in said
    if name not in ("ssl", "credential_provider"):
        assert repr(value) in said or f"{value:g}" in said


@pytest.mark.parametrize("name", ["password", "sentinel_kwargs"])
def test_a_secret_of_the_wrong_type_is_not_shown(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name) as refused:
        read_options({name: [PASSWORD]})

    assert PASSWORD not in str(refused.value)


def test_an_unknown_option_is_warned_of_once_per_process_with_a_hint(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        read_options({"leese_timeout": 3, "visibility_timeout": 3600, "fanout_patterns": True, "max_retries": 3})

    said = [record.message for record in caplog.records]
    assert said[0] == "unknown transport option 'leese_timeout' has no effect. Did you mean 'lease_timeout'?"
    assert "'visibility_timeout' has no effect here" in said[1] and "'lease_timeout'" in said[1]
    assert len(said) == 3


@pytest.mark.parametrize("path", ["abc", "1/2", f"x:{PASSWORD}@h/0"])
def test_a_database_that_is_no_number_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match="the database at the end of the broker URL is a number") as refused:
        Connection("redis-streams://h", virtual_host=path).transport  # noqa: B018

    assert PASSWORD not in str(refused.value)


# ---- who may connect ------------------------------------------------------------------------------------------


def refusal(url: str) -> str:
    """What the refused one is told."""
    with pytest.raises(ConfigurationError) as refused:
        Connection(url).connect()
    assert PASSWORD not in str(refused.value) and "wr0ng" not in str(refused.value)
    return str(refused.value)


def test_a_wrong_password_is_said_without_it(server: Any) -> None:
    assert "refuses the password of user 'default'" in refusal(ours(server, ":wr0ng"))
    assert "refuses the password of user 'nobody'" in refusal(ours(server, "nobody:wr0ng"))
    assert "asks for a password, and the broker URL has none" in refusal(ours(server).replace(f":{PASSWORD}@", ""))


def test_a_database_that_the_server_has_not_is_said(server: Any) -> None:
    assert "no database of that number" in refusal(ours(server)[:-1] + "99")


def test_a_task_is_refused_by_the_same_error(server: Any) -> None:
    with Celery(broker=ours(server, ":wr0ng")) as app, pytest.raises(ConfigurationError, match="refuses the password"):
        app.send_task("x")


@pytest.fixture
def acl(server: Any) -> Callable[..., str]:
    """acl(*rules) -> the broker URL of a user with these rules only."""

    def user(*rules: str) -> str:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "carol", "reset", "on", ">wr0ng-to-show", *rules)
        return ours(server, "carol:wr0ng-to-show")

    return user


def test_a_user_without_commands_is_told_all_of_them(acl: Callable[..., str]) -> None:
    said = refusal(acl("~cs1:*", "+@all", "-xadd", "-hset", "-xgroup"))

    assert (
        "may not run hset, xadd, xgroup|create, xgroup|createconsumer, xgroup|delconsumer. What it needs: ~cs1:* "
        in said
    )
    assert all(f"+{name}" in said for name in NEEDED)


def test_a_user_without_our_keys_is_told_which(acl: Callable[..., str]) -> None:
    assert "may not use keys that begin with cs1:" in refusal(acl("~other:*", "+@all"))


def test_a_user_without_transactions_is_not_probed_by_doing(acl: Callable[..., str], server: Any) -> None:
    assert "may not run multi" in refusal(acl("~cs1:*", "+@all", "-multi"))
    with server.client() as client:
        assert client.keys("*") == []


def test_looking_at_permissions_changes_nothing(acl: Callable[..., str], server: Any) -> None:
    with Connection(acl("~cs1:*", "+@all")) as connection:
        connection.connect()

    with server.client() as client:
        assert client.keys("*") == []


@pytest.mark.slow
@pytest.mark.parametrize("rules", [[f"+{name}" for name in NEEDED], ["+@all", "-@dangerous"]], ids=["exact", "cloud"])
def test_a_worker_needs_no_other_command_than_those_we_name(
    acl: Callable[..., str], server: Any, celery_processes: Any, eventually: Callable[..., Any], rules: list[str]
) -> None:
    url = acl("~cs1:*", *rules)
    with server.client() as client:
        client.execute_command("ACL", "LOG", "RESET")
    worker = celery_processes.worker(program(url), "-P", "solo", "-E", name="refused")
    with Celery(broker=url) as app:
        for number in range(5):
            app.send_task("refused.work", [number], countdown=1.2 if number == 4 else None)
        eventually(lambda: "worked on 4" in worker.log(), timeout=20)
        assert app.control.ping(timeout=3)
        with app.connection() as connection, connection.channel() as channel:
            channel.queue_declare("limited", arguments={"x-max-length": 3, "x-expires": 60_000})
            channel.basic_publish(channel.prepare_message("{}"), "", "limited")
            channel.basic_get("limited").requeue()
            channel.basic_get("limited").reject()
            channel.queue_purge("limited")
            channel.queue_delete("limited")
    assert worker.terminate() == 0

    with server.client() as client:
        refused = {entry[b"object"] for entry in client.execute_command("ACL", "LOG")}
    assert refused <= {name.encode() for name in WELCOME}


# ---- which server ---------------------------------------------------------------------------------------------


def test_a_cluster_is_refused(started: Callable[[Any], Any]) -> None:
    server = started(Redis(cluster_enabled="yes"))

    assert "is part of a Redis Cluster, which redis-streams:// does not support yet" in refusal(ours(server))


def test_a_server_that_cannot_find_abandoned_messages_is_refused(started: Callable[[Any], Any]) -> None:
    # Redis < 5 lacks the command and Redis < 6.2 its IDLE; this one lacks the command.
    server = started(Redis(rename_command="XPENDING not-here"))

    assert "is too old for redis-streams://" in refusal(ours(server))


def test_an_eviction_policy_that_throws_queues_away_is_warned_of(server: Any, caplog: Any) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            for _ in range(2):
                with Connection(ours(server)) as connection:
                    connection.connect()
        finally:
            client.config_set("maxmemory-policy", "noeviction")

    assert [record.message for record in caplog.records if "allkeys-lru" in record.message] == [
        f"127.0.0.1:{server.port}/0 has maxmemory-policy allkeys-lru: when its memory is full it throws queues away, "
        "with their tasks. Set maxmemory-policy to noeviction"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["password", "commands", "cluster", "key"])
def test_a_worker_ends_at_start_with_a_line_that_says_why(
    fault: str, redis_server: Any, started: Callable[[Any], Any], ends: Callable[[str], str]
) -> None:
    if fault == "password":
        assert "refuses the password of user 'default'" in ends(ours(redis_server, ":wr0ng"))
    elif fault == "commands":
        with redis_server.client() as client:
            client.execute_command("ACL", "SETUSER", "carol", "reset", "on", ">wr0ng", "~*", "+@all", "-xclaim")
        assert "user 'carol' at 127.0.0.1" in ends(ours(redis_server, "carol:wr0ng"))
    elif fault == "cluster":
        assert "is part of a Redis Cluster" in ends(ours(started(Redis(cluster_enabled="yes"))))
    else:
        with redis_server.client() as client:
            client.set("cs1:{celery}:p0", "a string of somebody else")
        said = ends(ours(redis_server))
        assert "key 'cs1:{celery}:p0' is a string, and the broker keeps a stream there: rename that key" in said


@pytest.mark.slow
def test_a_worker_waits_for_a_server_that_is_not_there_yet_or_is_a_replica(
    started: Callable[[Any], Any], celery_processes: Any, eventually: Callable[..., Any]
) -> None:
    server = Redis(replicaof=f"127.0.0.1 {free_port()}", masterauth=PASSWORD)
    server.port = free_port()
    worker = celery_processes.worker(program(ours(server)), "-P", "solo", name="refused", ready=False)
    worker.wait_for_log("Connection refused")

    started(server)

    worker.wait_for_log("is a replica, which takes no messages")
    with server.client() as client:
        client.execute_command("REPLICAOF", "NO", "ONE")
    worker.wait_ready()
    assert PASSWORD not in worker.log()


@pytest.mark.slow
def test_a_running_worker_waits_while_its_password_is_changed(
    redis_server: Any, celery_processes: Any, eventually: Callable[..., Any]
) -> None:
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "carol", "reset", "on", ">wr0ng", "~*", "+@all")
        worker = celery_processes.worker(program(ours(redis_server, "carol:wr0ng")), "-P", "solo", name="refused")
        client.execute_command("ACL", "SETUSER", "carol", "resetpass", ">another")
        client.execute_command("CLIENT", "KILL", "USER", "carol")
        worker.wait_for_log("refuses the password of user 'carol'")

        client.execute_command("ACL", "SETUSER", "carol", "resetpass", ">wr0ng")
    with Celery(broker=ours(redis_server)) as app:
        app.send_task("refused.work", [7])

    eventually(lambda: "worked on 7" in worker.log(), timeout=20)


# ---- in use ---------------------------------------------------------------------------------------------------


def test_a_key_of_another_type_is_named_to_who_publishes(server: Any) -> None:
    with server.client() as client:
        client.sadd("cs1:{celery}:p0", "mine")
    with Celery(broker=ours(server)) as app, pytest.raises(ConfigurationError, match=r"'cs1:\{celery\}:p0' is a set"):
        app.send_task("x")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["redis", "valkey", "redis62"])
def test_a_full_server_is_drained_and_says_what_to_do_to_who_publishes(
    name: str, servers: Any, started: Callable[[Any], Any], celery_processes: Any, eventually: Callable[..., Any]
) -> None:
    kind = type(servers.get(name))
    server = started(kind())
    # A server that is full makes no consumer group, so one worker has been there before.
    assert celery_processes.worker(program(ours(server)), "-P", "solo", name="refused").terminate() == 0
    with Celery(broker=ours(server)) as app, server.client() as client:
        for number in range(200):
            app.send_task("refused.work", [number])
        client.config_set("maxmemory", "100kb")
        begun = time.monotonic()
        with pytest.raises(redis.exceptions.OutOfMemoryError, match=r"at its maxmemory .*raise maxmemory"):
            app.send_task("refused.work", [1000])
        assert time.monotonic() - begun < 5

        worker = celery_processes.worker(program(ours(server)), "-P", "solo", "-E", name="refused")

        eventually(lambda: client.xlen("cs1:{celery}:p0") == 0, timeout=40)
        client.config_set("maxmemory", "0")
        app.send_task("refused.work", [2000])
        eventually(lambda: "worked on 2000" in worker.log(), timeout=20)
        assert all(worker.log().count(f"worked on {number}\n") == 1 for number in range(200))
        assert "worked on 1000\n" not in worker.log()
    assert worker.running


@pytest.mark.slow
def test_the_oldest_server_carries_messages_and_refuses_alike(servers: Any, acl_of_62: Callable[..., str]) -> None:
    server = servers.get("redis62")
    with Connection(ours(server), transport_options={"block_timeout": 0.2}) as connection:
        queue = connection.SimpleQueue(Queue("here", routing_key="here"))
        queue.put(1)
        queue.get(timeout=10).ack()
        queue.close()

    assert "may not run xadd. What it needs" in refusal(acl_of_62("~cs1:*", "+@all", "-xadd"))
    assert "may not use keys" in refusal(acl_of_62("~other:*", "+@all"))


@pytest.fixture
def acl_of_62(servers: Any) -> Callable[..., str]:
    server: Redis62 = servers.get("redis62")

    def user(*rules: str) -> str:
        with server.client() as client:
            client.flushall()
            client.execute_command("ACL", "SETUSER", "carol", "reset", "on", ">wr0ng-to-show", *rules)
        return ours(server, "carol:wr0ng-to-show")

    return user


def test_a_refusal_in_a_plain_program_shows_no_password(server: Any) -> None:
    source = f"from kombu import Connection, Queue; Connection({ours(server, 'nobody:wr0ng')!r}).connect()"

    done = subprocess.run([sys.executable, "-"], input=source, capture_output=True, text=True, timeout=60)

    assert "refuses the password of user 'nobody'" in done.stderr
    assert "wr0ng" not in done.stderr
