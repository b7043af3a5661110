"""`celery claim streams|dead|delayed|purge`, with the broker alone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue

from celery_claim.streams import dead_letters, delayed
from celery_claim.streams.look import look
from celery_claim.streams.wire.keys import Keys
from tests.processes import REPOSITORY
from tests.servers import free_port

Connect = Callable[..., Connection]
Answer = Callable[..., Any]
QUEUE, SECRET = "work", "sesame-17"
KEYS = Keys()
PROGRAM = """
import os
from celery import Celery

app = Celery("opsproj", broker=os.environ["OPS_BROKER"])
app.conf.task_default_queue = "work"
"""


class Shell:
    """`celery -A opsproj claim ...` on one broker."""

    def __init__(self, folder: Path, url: str) -> None:
        (folder / "opsproj.py").write_text(PROGRAM)
        self.folder, self.url = folder, url

    def __call__(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OPS_BROKER": self.url, "PYTHONPATH": f"{self.folder}:{REPOSITORY}"}
        command = [sys.executable, "-m", "celery", "-A", "opsproj", "claim", *arguments]
        return subprocess.run(
            command, env=environment, input=stdin, capture_output=True, text=True, timeout=60, check=False
        )

    def answer(self, *arguments: str) -> Any:
        done = self(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def shell(tmp_path: Path, broker_url: str) -> Shell:
    return Shell(tmp_path, broker_url)


def publish(connection: Connection, *task_ids: str, queue: str = QUEUE, **options: Any) -> None:
    with connection.channel() as channel:
        producer = connection.Producer(channel)
        for task_id in task_ids:
            headers = {"id": task_id, "task": "opsproj.pay", "argsrepr": f"('{SECRET}',)", **options.get("headers", {})}
            body = [[SECRET], {}, {}]
            given = {**options, "headers": headers}
            producer.publish(body, routing_key=queue, declare=[Queue(queue, routing_key=queue)], **given)


def later(seconds: float) -> dict[str, str]:
    return {"eta": (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()}


def consumer_of(connection: Connection, prefetch: int = 0) -> tuple[Consumer, list[Any]]:
    got: list[Any] = []
    consumer = Consumer(connection.channel(), [Queue(QUEUE, routing_key=QUEUE)], accept=["json"])
    consumer.register_callback(lambda body, message: got.append(message))
    if prefetch:
        consumer.qos(prefetch_count=prefetch)
    consumer.consume()
    return consumer, got


def receive(connection: Connection, got: list[Any], count: int) -> None:
    while len(got) < count:
        connection.drain_events(timeout=5)


def kill(connection: Connection, *task_ids: str, **options: Any) -> None:
    """Make dead letters of messages, as a worker does that cannot read them."""
    publish(connection, *task_ids, **options)
    consumer, got = consumer_of(connection)
    receive(connection, got, len(task_ids))
    for message in got:
        message.reject()
    consumer.channel.close()


def test_streams_counts_what_waits_is_held_delayed_and_dead(shell: Shell, connect: Connect) -> None:
    connection = connect()
    kill(connection, "dead-1")
    publish(connection, "a", "b", "c", priority=0)
    publish(connection, "d", "e", "f", "g", priority=3)
    publish(connection, "h", "i", priority=9)
    publish(connection, "j", headers=later(900))
    holder = connect()
    _, got = consumer_of(holder, prefetch=2)
    receive(holder, got, 2)

    (facts,) = [each for each in shell.answer("streams") if each["queue"] == QUEUE]

    assert (facts["ready"], facts["pending"], facts["delayed"], facts["dead"]) == (7, 2, 1, 1)
    assert facts["consumers"] == 1
    assert 0 <= facts["oldest_idle_ms"] < 60_000
    assert 0 <= facts["oldest_ready_ms"] < 60_000
    assert 800_000 < facts["next_due_ms"] <= 900_000
    shown = shell("streams", QUEUE).stdout
    assert QUEUE in shown and "0:14:" in shown


def test_a_message_that_was_given_back_is_ready_and_not_pending(connect: Connect, server: Any) -> None:
    connection = connect()
    publish(connection, "a", "b")
    consumer, got = consumer_of(connection)
    receive(connection, got, 2)
    consumer.channel.close()

    with server.client() as client:
        (facts,) = look(client, KEYS, "celery", [QUEUE])

    assert (facts.ready, facts.pending, facts.consumers) == (2, 0, 0)
    assert facts.oldest_idle_ms is None
    assert facts.oldest_ready_ms is not None


def test_a_queue_that_nobody_consumed_yet_is_ready_as_a_whole(connect: Connect, shell: Shell) -> None:
    publish(connect(), "a", "b", "c", queue="fresh")

    (facts,) = shell.answer("streams", "fresh")

    assert (facts["ready"], facts["pending"], facts["consumers"]) == (3, 0, 0)


def test_dead_letters_are_listed_without_arguments_unless_asked(connect: Connect, shell: Shell) -> None:
    kill(connect(), "t-1", "t-2")

    first, second = shell.answer("dead", QUEUE)
    plain, shown = shell("dead", QUEUE).stdout, shell("dead", QUEUE, "--id", first["id"], "--show").stdout

    assert (first["task"], first["task_id"], first["reason"], first["deliveries"]) == (
        "opsproj.pay", "t-1", "rejected", 1,
    )  # fmt: skip
    assert abs(first["at_ms"] / 1000 - datetime.now(timezone.utc).timestamp()) < 60
    assert second["task_id"] == "t-2"
    assert "opsproj.pay" in plain and "t-2" in plain
    assert SECRET not in plain + json.dumps([first, second])
    assert SECRET in shown and "t-2" not in shown


def test_a_requeued_letter_is_a_fresh_message_in_its_old_priority(connect: Connect, shell: Shell, server: Any) -> None:
    kill(connect(), "t-1", "t-2", priority=6)
    letter, other = shell.answer("dead", QUEUE)

    assert shell.answer("dead", QUEUE, "--requeue", "--id", letter["id"]) == {"queue": QUEUE, "requeued": 1}

    assert [each["task_id"] for each in shell.answer("dead", QUEUE)] == [other["task_id"]]
    connection = connect()
    _, got = consumer_of(connection)
    receive(connection, got, 1)
    message = got[0]
    assert message.headers["id"] == "t-1"
    assert message.payload == [[SECRET], {}, {}]
    assert message.properties["priority"] == 6
    assert "x-delivery-count" not in message.headers
    with server.client() as client:
        assert client.xpending(KEYS.stream(QUEUE, 6), "celery")["pending"] == 1


def test_all_letters_are_requeued(connect: Connect, shell: Shell) -> None:
    kill(connect(), *(f"t-{number}" for number in range(250)))

    assert "250 messages requeued" in shell("dead", QUEUE, "--requeue", "--all").stdout
    assert shell.answer("dead", QUEUE) == []
    assert shell.answer("streams", QUEUE)[0]["ready"] == 250


def test_all_letters_are_dropped(connect: Connect, shell: Shell) -> None:
    kill(connect(), "t-1", "t-2", "t-3")

    assert shell.answer("dead", QUEUE, "--drop", "--all") == {"queue": QUEUE, "dropped": 3}
    (facts,) = shell.answer("streams", QUEUE)
    assert (facts["ready"], facts["dead"]) == (0, 0)


def test_a_letter_is_requeued_by_one_of_two_who_want_it(connect: Connect, server: Any) -> None:
    kill(connect(), "t-1")
    with server.client() as client:
        letters = list(dead_letters.letters(client, KEYS, QUEUE))

        assert len(list(dead_letters.replay(client, KEYS, QUEUE, letters))) == 1
        assert list(dead_letters.replay(client, KEYS, QUEUE, letters)) == []
        assert client.xlen(KEYS.stream(QUEUE, 0)) == 1
        assert client.xlen(KEYS.dead(QUEUE)) == 0


def test_a_requeue_that_a_full_server_refuses_keeps_the_letter(connect: Connect, shell: Shell, server: Any) -> None:
    kill(connect(), "t-1")
    with server.client() as client:
        client.config_set("maxmemory", "1")
        try:
            refused = shell("dead", QUEUE, "--requeue", "--all")
        finally:
            client.config_set("maxmemory", "0")

        assert refused.returncode == 69, refused.stdout
        assert "maxmemory" in refused.stderr
        assert client.xlen(KEYS.dead(QUEUE)) == 1
        assert client.xlen(KEYS.stream(QUEUE, 0)) == 0


def test_a_foreign_entry_in_the_dead_letters_is_listed_and_put_back_as_it_was(
    connect: Connect, shell: Shell, server: Any
) -> None:
    connection = connect()
    publish(connection, "good")
    with server.client() as client:
        client.xadd(KEYS.stream(QUEUE, 0), {"id": b"\xff\x00", "reason": "theirs"})
        consumer, got = consumer_of(connection)
        receive(connection, got, 1)
        while client.xlen(KEYS.dead(QUEUE)) == 0:
            with contextlib.suppress(TimeoutError):
                connection.drain_events(timeout=0.1)
        consumer.channel.close()

        (letter,) = shell.answer("dead", QUEUE, "--show")
        shell("dead", QUEUE, "--requeue", "--all")

        assert letter["reason"].startswith("undecodable")
        assert (letter["task"], letter["task_id"]) == (None, None)
        assert client.xrange(KEYS.stream(QUEUE, 0))[-1][1] == {b"id": b"\xff\x00", b"reason": b"theirs"}


def test_delayed_messages_are_listed_and_cancelled_by_task_id(connect: Connect, shell: Shell, server: Any) -> None:
    connection = connect()
    publish(connection, "late", headers=later(7200))
    publish(connection, "soon", headers=later(600), priority=3)
    publish(connection, "s*on", headers=later(600))

    soon, star, late = sorted(shell.answer("delayed", QUEUE), key=lambda each: (each["due_ms"], each["priority"]))
    assert {soon["task_id"], star["task_id"], late["task_id"]} == {"soon", "s*on", "late"}
    assert late["task"] == "opsproj.pay"

    assert shell.answer("delayed", QUEUE, "--cancel", "s*on") == {"queue": QUEUE, "task_id": "s*on", "cancelled": 1}
    again = shell("delayed", QUEUE, "--cancel", "s*on")
    assert again.returncode == 1
    assert "no delayed task" in again.stderr
    assert [each["task_id"] for each in shell.answer("delayed", QUEUE)] == ["soon", "late"]
    with server.client() as client:
        assert client.hlen(KEYS.delayed(QUEUE)) == 2


def test_a_cancelled_task_does_not_come_when_it_is_due(connect: Connect, server: Any) -> None:
    connection = connect()
    publish(connection, "never", headers=later(1.3))
    publish(connection, "comes", headers=later(1.4))
    with server.client() as client:
        assert delayed.cancel(client, KEYS, QUEUE, "never") == 1
    _, got = consumer_of(connection)
    receive(connection, got, 1)

    assert [message.headers["id"] for message in got] == ["comes"]


def test_purge_asks_first_and_leaves_what_workers_hold(connect: Connect, shell: Shell) -> None:
    connection = connect()
    publish(connection, *"abcde")
    publish(connection, "f", headers=later(600))
    holder = connect()
    _, got = consumer_of(holder, prefetch=2)
    receive(holder, got, 2)

    asked = shell("purge", "--queue", QUEUE, stdin="n\n")
    assert asked.returncode == 1
    assert "no undo" in asked.stderr
    assert shell.answer("streams", QUEUE)[0]["ready"] == 3

    assert shell.answer("purge", "--queue", QUEUE, "--force") == [{"queue": QUEUE, "purged": 4}]
    (facts,) = shell.answer("streams", QUEUE)
    assert (facts["ready"], facts["pending"], facts["delayed"]) == (0, 2, 0)


def test_wrong_usage_is_64_and_says_what_is_right(connect: Connect, shell: Shell) -> None:
    publish(connect(), "a")
    for arguments, said in (
        (("dead", "wrok"), "Did you mean 'work'?"),
        (("dead", "}x"), "cannot be named"),
        (("dead", QUEUE, "--requeue"), "say which"),
        (("dead", QUEUE, "--requeue", "--drop", "--all"), "not both"),
        (("dead", QUEUE, "--drop", "--id", "nonsense"), "no id of a dead letter"),
        (("dead", QUEUE, "--drop", "--id", "1-1"), "nothing was done"),
        (("purge", "--force"), "--queue"),
    ):
        refused = shell(*arguments)
        assert (refused.returncode, said in refused.stderr) == (64, True), refused.stderr


def test_another_broker_is_refused_clearly(tmp_path: Path) -> None:
    shell = Shell(tmp_path, f"redis://:{SECRET}@localhost:1/0")

    refused = shell("streams")

    assert refused.returncode == 64
    assert "redis-streams://" in refused.stderr
    assert SECRET not in refused.stdout + refused.stderr


def test_a_broker_that_cannot_be_reached_is_69_and_no_password_is_printed(tmp_path: Path) -> None:
    shell = Shell(tmp_path, f"redis-streams://:{SECRET}@localhost:{free_port()}/0")

    for arguments in (("streams",), ("dead", QUEUE), ("delayed", QUEUE), ("purge", "--queue", QUEUE, "--force")):
        down = shell(*arguments)

        assert down.returncode == 69, down.stderr
        assert "broker is not available" in down.stderr
        assert "Traceback" not in down.stderr
        assert SECRET not in down.stdout + down.stderr


def test_a_wrong_password_is_69_and_not_printed(server: Any, tmp_path: Path) -> None:
    with server.client() as client:
        client.acl_setuser("someone", enabled=True, passwords=["+right"], keys=["*"], commands=["+@all"])
        try:
            shell = Shell(tmp_path, server.url.replace("redis://", f"redis-streams://someone:{SECRET}@", 1))
            refused = shell("streams")
        finally:
            client.acl_deluser("someone")

    assert refused.returncode == 69
    assert "refuses the password of user 'someone'" in refused.stderr
    assert SECRET not in refused.stdout + refused.stderr


def test_a_backlog_costs_no_more_to_look_at_than_an_empty_queue(connect: Connect, server: Any) -> None:
    with server.client() as client:
        with client.pipeline(transaction=False) as pipe:
            for number in range(100_000):
                pipe.xadd(KEYS.stream(QUEUE, 0), {"body": "x"})
                if number % 10_000 == 9_999:
                    pipe.execute()
        look(client, KEYS, "celery", [QUEUE])
        client.config_resetstat()
        (facts,) = look(client, KEYS, "celery", [QUEUE])
        spent = client.info("commandstats")

    assert facts.ready == 100_000
    called = sum(each["usec"] for name, each in spent.items() if name in ("cmdstat_evalsha", "cmdstat_eval"))
    assert called < 5_000
