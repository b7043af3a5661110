"""Promises of the broker at kombu's level, on every server under test."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Queue

from celery_claim.streams import options
from celery_claim.streams.append import QueueFull

Connect = Callable[..., Connection]
QUEUE = "work"


def publish(connection: Connection, *bodies: Any, **options: Any) -> None:
    with connection.channel() as channel:
        producer = connection.Producer(channel)
        for body in bodies:
            producer.publish({"n": body}, routing_key=QUEUE, declare=[Queue(QUEUE, routing_key=QUEUE)], **options)


class Worker:
    """Consumes the queue and keeps what it got, unacknowledged."""

    def __init__(self, connection: Connection, prefetch: int = 0) -> None:
        self.connection, self.got = connection, []
        self.channel = connection.channel()
        self.consumer = Consumer(self.channel, [Queue(QUEUE, routing_key=QUEUE)], accept=["json"])
        self.consumer.register_callback(lambda body, message: self.got.append(message))
        if prefetch:
            self.consumer.qos(prefetch_count=prefetch)
        self.consumer.consume()

    def read(self, seconds: float = 1.5, until: int | None = None) -> list[Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end and (until is None or len(self.got) < until):
            try:
                self.connection.drain_events(timeout=0.1)
            except TimeoutError:
                continue
        return [message.payload["n"] for message in self.got]


def held(server: Any) -> tuple[int, int]:
    """Entries on the server, and how many of them are pending."""
    with server.client() as client:
        streams = client.keys("*{work}:p*")
        pending = sum(client.xpending(key, "celery")["pending"] for key in streams if client.xinfo_groups(key))
        return sum(client.xlen(key) for key in streams), pending


def test_acknowledged_means_deleted(server: Any, connect: Connect, eventually: Any) -> None:
    publish(connect(), *range(25))
    worker = Worker(connect())

    assert worker.read(5, until=25) == list(range(25))
    for message in worker.got:
        message.ack()

    eventually(lambda: held(server) == (0, 0))


def test_a_read_never_exceeds_the_prefetch(server: Any, connect: Connect) -> None:
    for priority in (0, 3, 6, 9):
        publish(connect(), 1, 2, 3, priority=priority)
    worker = Worker(connect(), prefetch=2)

    worker.read(1)

    assert len(worker.got) == 2
    assert held(server) == (12, 2)


def test_priorities_are_exact_at_prefetch_one(connect: Connect) -> None:
    for priority in (9, 6, 3, 0):
        publish(connect(), priority, priority, priority=priority)
    worker = Worker(connect(), prefetch=1)
    order = []
    while len(order) < 8:
        worker.got.clear()
        order += worker.read(5, until=1)
        worker.got[0].ack()

    assert order == [0, 0, 3, 3, 6, 6, 9, 9]


def test_a_delayed_message_is_held_by_the_server_and_comes_when_due(server: Any, connect: Connect) -> None:
    due = datetime.now(timezone.utc) + timedelta(seconds=1.5)
    published = time.monotonic()
    publish(connect(), 1, headers={"eta": due.isoformat(), "id": "x"})
    worker = Worker(connect(block_timeout=5))

    assert held(server) == (0, 0)
    assert worker.read(5, until=1) == [1]
    assert 1.3 < time.monotonic() - published < 1.9
    assert worker.got[0].headers["x-eta"] == due.isoformat()
    assert "eta" not in worker.got[0].headers


def test_an_earlier_delayed_message_wakes_a_blocked_reader(connect: Connect) -> None:
    worker = Worker(connect(block_timeout=20))
    worker.read(0.5)
    due = datetime.now(timezone.utc) + timedelta(seconds=1.2)
    publish(connect(), 1, headers={"eta": due.isoformat()})

    assert worker.read(3, until=1) == [1]


def test_a_live_owner_keeps_its_message_past_the_lease(connect: Connect) -> None:
    publish(connect(), 1)
    owner = Worker(connect(lease_timeout=0.8))
    owner.read(5, until=1)
    other = Worker(connect(lease_timeout=0.8))

    assert other.read(3) == []


def test_an_expired_lease_goes_to_another_worker_and_a_late_ack_cancels_the_copy(
    server: Any, connect: Connect, eventually: Any
) -> None:
    publish(connect(), 1)
    frozen = Worker(connect(lease_timeout=0.8))
    frozen.read(5, until=1)
    # What a SIGSTOP does to the thread that renews.
    frozen.channel.leases.renew = lambda: None
    other = Worker(connect(lease_timeout=0.8))

    assert other.read(5, until=1) == [1]
    assert other.got[0].delivery_info["redelivered"]
    frozen.got[0].ack()

    eventually(lambda: held(server) == (0, 0))


def test_a_closed_channel_gives_unstarted_messages_back_at_once_and_uncounted(server: Any, connect: Connect) -> None:
    publish(connect(), *range(5))
    first = Worker(connect())
    first.read(5, until=5)
    second = Worker(connect(block_timeout=20), prefetch=5)
    second.read(0.5)

    first.channel.close()

    assert second.read(2, until=5) == list(range(5))
    assert not any(message.delivery_info.get("redelivered") for message in second.got)


def test_a_message_rejected_too_often_is_a_dead_letter(server: Any, connect: Connect) -> None:
    publish(connect(), 1)
    worker = Worker(connect(delivery_limit=2, requeue_backoff_max=0.1), prefetch=1)
    for _ in range(2):
        worker.got.clear()
        worker.read(5, until=1)
        worker.got[0].requeue()
    worker.got.clear()

    assert worker.read(1.5) == []
    with server.client() as client:
        ((_, letter),) = client.xrange("cs1:{work}:dead")
    assert letter[b"reason"] == b"delivery limit"
    assert letter[b"body"] == b'{"n": 1}'
    assert held(server) == (0, 0)


def test_foreign_bytes_in_the_stream_become_a_dead_letter(server: Any, connect: Connect, eventually: Any) -> None:
    publish(connect(), 1)
    with server.client() as client:
        client.xadd("cs1:{work}:p0", {"foreign": b"\xff\xfe"})
        worker = Worker(connect())

        assert worker.read(2) == [1]
        eventually(lambda: client.xlen("cs1:{work}:dead") == 1)


def test_a_full_queue_refuses_and_says_so(connect: Connect) -> None:
    connection = connect(max_length=2)
    publish(connection, 1, 2)

    with pytest.raises(QueueFull, match="work"):
        publish(connection, 3)


def test_purge_leaves_what_a_worker_holds(server: Any, connect: Connect) -> None:
    publish(connect(), *range(6))
    worker = Worker(connect(), prefetch=2)
    worker.read(1)

    with connect().channel() as channel:
        assert channel.queue_purge(QUEUE) == 4
    assert held(server) == (2, 2)


def test_flushall_does_not_stop_a_worker(server: Any, connect: Connect) -> None:
    worker = Worker(connect())
    worker.read(0.5)
    with server.client() as client:
        client.flushall()
    publish(connect(), 1)

    assert worker.read(5, until=1) == [1]


def test_a_broadcast_published_by_a_producer_alone_reaches_every_worker(connect: Connect) -> None:
    exchange = Exchange("news", type="fanout")
    got: list[str] = []
    connections = [connect(), connect()]
    for name, connection in zip("ab", connections, strict=True):
        consumer = Consumer(connection.channel(), [Queue(f"news.{name}", exchange, auto_delete=True)], accept=["json"])
        consumer.register_callback(lambda body, message, name=name: got.append(name))
        consumer.consume()
    connect().Producer().publish({}, exchange="news", routing_key="")
    for connection in connections:
        connection.drain_events(timeout=5)

    assert sorted(got) == ["a", "b"]


def test_binary_bodies_and_compression_survive(connect: Connect) -> None:
    publish(connect(), "äöü" * 200, compression="zlib")
    worker = Worker(connect())

    assert worker.read(5, until=1) == ["äöü" * 200]


def test_an_unknown_option_is_warned_of_with_a_hint(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Once per process, and another test may have been first.
    monkeypatch.setattr(options, "_told", set())
    connect(leese_timeout=3).connect()

    assert "Did you mean 'lease_timeout'?" in caplog.text


def test_a_batch_of_a_producer_goes_out_together_and_says_so(server: Any, connect: Connect) -> None:
    connection = connect()
    queue = Queue(QUEUE, routing_key=QUEUE)
    with connection.channel() as channel:
        producer = connection.Producer(channel)
        if not hasattr(producer, "batch"):
            pytest.skip("this kombu has no Producer.batch()")
        assert producer.supports_batch_publish
        with producer.batch():
            for number in range(3):
                producer.publish({"n": number}, routing_key=QUEUE, declare=[queue])
            assert held(server) == (0, 0)

    assert held(server) == (3, 0)
    assert Worker(connection).read(until=3) == [0, 1, 2]
