"""A model of one queue beside a real server: any order of what producers, workers and people do to it.

Workers freeze, are killed, lose replies and come back late. Nothing is lost, nothing is with two live owners, and what
was acknowledged or buried never comes again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from celery_claim.streams import append, scripts
from celery_claim.streams.consumer_group import ensure_groups
from celery_claim.streams.lease import Entry, Leases
from celery_claim.streams.options import StreamOptions
from celery_claim.streams.read import Read, Reader
from celery_claim.streams.wire.keys import Keys

QUEUE, GROUP = "work", "celery"
LIMIT = 2
#: Longer than the test: a lease ends when the model says so. Acknowledgements leave when the model says so.
OPTIONS = StreamOptions(lease_timeout=3600, recovery_grace=0, delivery_limit=LIMIT, ack_batch=5000, ack_delay=60)
KEYS = Keys()
AGES_AGO_MS = 10**8


@dataclass(eq=False)
class Worker:
    """One consumer as the library has it, and what the model knows of it."""

    client: Any
    #: Tags of what it thinks it holds -> the message's number.
    holds: dict[str, int] = field(default_factory=dict)
    #: Tags that it has acknowledged, and the server does not know it yet.
    acked: dict[str, int] = field(default_factory=dict)
    #: Numbers of its messages that died while it read.
    died: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leases = Leases(self.client, KEYS, OPTIONS, self.on_room)
        self.leases.queues.add(QUEUE)
        self.reader = Reader(self.client, KEYS, OPTIONS, self.leases, self)

    @property
    def name(self) -> str:
        return self.leases.consumer

    def on_room(self) -> None:
        """Asked by the leases."""

    def on_dead(self, read: Read, reason: str) -> None:
        """Told by the reader."""
        assert reason == "delivery limit"
        self.died.append((number_of(read), read.entry.deliveries))

    def fetch(self, room: int, *, recover: bool) -> list[Read]:
        self.reader._recover_at = 0.0 if recover else float("inf")
        return self.reader.fetch((QUEUE,), room)


def number_of(read: Read) -> int:
    return int(read.fields[b"body"])


class Streams(RuleBasedStateMachine):
    """What producers, workers and people may do, in any order."""

    def __init__(self, client: Any) -> None:
        super().__init__()
        self.client = client
        self.count = 0
        #: Messages that are neither settled, dead nor purged -> the name of the consumer that has them, or None.
        self.alive: dict[int, str | None] = {}
        #: How often each was delivered, as far as that counts.
        self.deliveries: Counter[int] = Counter()
        self.delayed: set[int] = set()
        #: Those whose owner has been silent for too long.
        self.expired: set[int] = set()
        self.settled: set[int] = set()
        self.dead: set[int] = set()
        self.workers: list[Worker] = []

    @initialize()
    def start(self) -> None:
        self.client.flushdb()
        ensure_groups(self.client, KEYS, GROUP, [QUEUE])
        self.workers = [Worker(self.client) for _ in range(3)]

    # ---- producers and people

    @rule(step=st.sampled_from(KEYS.steps), many=st.integers(1, 4))
    def publish(self, step: int, many: int) -> None:
        for _ in range(many):
            append.now(KEYS, QUEUE, step, self.message()).run(self.client)
            self.alive[self.count] = None

    @rule(step=st.sampled_from(KEYS.steps))
    def publish_delayed(self, step: int) -> None:
        append.when_due(KEYS, QUEUE, step, self.message(), seconds=3600).run(self.client)
        self.delayed.add(self.count)

    def message(self) -> dict[str, Any]:
        self.count += 1
        return {"body": str(self.count), "headers": {}, "properties": {}}

    @rule()
    def delayed_ones_are_due(self) -> None:
        for tag in self.client.zrange(KEYS.due(QUEUE), 0, -1):
            self.client.zadd(KEYS.due(QUEUE), {tag: 1})
        self.alive.update(dict.fromkeys(self.delayed))
        self.delayed = set()

    @rule()
    def purge(self) -> None:
        names = [KEYS.due(QUEUE), KEYS.delayed(QUEUE), *KEYS.streams(QUEUE)]
        # Due ones that no read has moved yet are purged as delayed ones.
        unheld = {number for number, owner in self.alive.items() if owner is None} | self.delayed
        assert scripts.run(self.client, "purge", names, [GROUP]) == len(unheld)
        self.alive = {number: owner for number, owner in self.alive.items() if owner is not None}
        self.delayed = set()

    # ---- workers

    @rule(which=st.integers(0, 2), room=st.integers(1, 6), recover=st.booleans())
    def fetch(self, which: int, room: int, recover: bool) -> None:
        worker = self.workers[which]
        reads = worker.fetch(room, recover=recover)
        assert len(reads) <= room
        self.taken(worker, reads, recover=recover)
        worker.leases.hold((read.tag, read.entry) for read in reads)
        worker.holds.update((read.tag, number_of(read)) for read in reads)

    def taken(self, worker: Worker, reads: list[Read], *, recover: bool) -> None:
        for number, deliveries in worker.died:
            assert deliveries == LIMIT
            self.leaves_its_owner(number, worker, recover=recover)
            del self.alive[number]
            self.dead.add(number)
        worker.died = []
        for read in reads:
            self.deliveries[number_of(read)] += 1
            assert read.entry.deliveries == self.deliveries[number_of(read)] <= LIMIT
            self.leaves_its_owner(number_of(read), worker, recover=recover)
            self.alive[number_of(read)] = worker.name

    def leaves_its_owner(self, number: int, worker: Worker, *, recover: bool) -> None:
        """A message may be taken from nobody, or from another whose lease is over."""
        assert number in self.alive, f"{number} came though it was settled, buried, purged or not due"
        owner = self.alive[number]
        assert owner is None or (recover and number in self.expired and owner != worker.name), "two live owners"
        self.expired.discard(number)

    @rule(which=st.integers(0, 2), room=st.integers(1, 4))
    def lose_the_reply_of_a_read(self, which: int, room: int) -> None:
        """The server handed messages out, and the connection broke: the worker reads on under another name."""
        worker = self.workers[which]
        self.taken(worker, worker.fetch(room, recover=False), recover=False)
        # Its thread would acknowledge and give back by itself, at any time.
        worker.leases.end()
        worker.leases.left = True
        self.workers[which] = Worker(self.client)
        # It holds what it held, and reads no more.
        self.workers.append(worker)

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        worker, tags = self.some_held(data)
        for tag in tags:
            worker.leases.ack(tag)
            worker.acked[tag] = worker.holds.pop(tag)

    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        worker.leases.flush()
        self.flushed(worker)

    def flushed(self, worker: Worker) -> None:
        """Finished work is finished, whoever has the message now."""
        for number in worker.acked.values():
            if self.alive.pop(number, "gone") != "gone":
                self.settled.add(number)
            self.expired.discard(number)
        worker.acked = {}

    @rule(data=st.data(), counted=st.booleans())
    def release(self, data: st.DataObject, counted: bool) -> None:
        worker, tags = self.some_held(data)
        worker.leases.release(tags, counted=counted)
        for tag in tags:
            self.released(worker, worker.holds.pop(tag), counted=counted)

    def released(self, worker: Worker, number: int, *, counted: bool) -> None:
        if self.alive.get(number) == worker.name:
            self.alive[number] = None
            self.expired.discard(number)
            self.deliveries[number] -= not counted

    @rule(data=st.data())
    def bury(self, data: st.DataObject) -> None:
        worker, tags = self.some_held(data)
        for tag in tags:
            number = worker.holds.pop(tag)
            buried = worker.leases.bury(tag, "rejected")
            assert (buried is not None) == (self.alive.get(number) == worker.name)
            if buried is not None:
                del self.alive[number]
                self.dead.add(number)
                self.expired.discard(number)

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        worker.leases.renew()
        known = {*worker.holds.values(), *worker.acked.values()} if worker.leases.left else self.alive.keys()
        self.expired -= {number for number in known if self.alive.get(number) == worker.name and number in known}

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        held = list(worker.holds.values())
        worker.leases.close()
        self.flushed(worker)
        for number in held:
            self.released(worker, number, counted=False)
        self.replace(worker)

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        worker.leases.end()
        self.replace(worker)

    def replace(self, worker: Worker) -> None:
        self.workers.remove(worker)
        if not worker.leases.left:
            # Those who may read stand in front.
            self.workers.insert(0, Worker(self.client))

    # ---- time

    @rule(data=st.data())
    def leases_end(self, data: st.DataObject) -> None:
        """A worker is frozen, or killed: nobody has renewed what it holds."""
        owners = sorted({owner for owner in self.alive.values() if owner is not None})
        if owners:
            self.expire({data.draw(st.sampled_from(owners))})

    @rule(frozen=st.integers(0, 2), heir=st.integers(0, 2))
    def a_frozen_worker_is_succeeded(self, frozen: int, heir: int) -> None:
        """By itself, when it was the first to look after it woke up."""
        self.expire({self.workers[frozen].name})
        self.fetch(heir, room=20, recover=True)

    @rule()
    def back_offs_end(self) -> None:
        self.expire({"@free"})

    def expire(self, names: set[str]) -> None:
        for stream in KEYS.streams(QUEUE):
            for each in self.client.xpending_range(stream, GROUP, "-", "+", 1000):
                if each["consumer"].decode() in names:
                    self.client.xclaim(
                        stream, GROUP, each["consumer"], 0, [each["message_id"]], idle=AGES_AGO_MS,
                        retrycount=each["times_delivered"], justid=True,
                    )  # fmt: skip
        self.expired |= {number for number, owner in self.alive.items() if owner in names}

    def some_held(self, data: st.DataObject) -> tuple[Worker, list[str]]:
        """Messages that one of the workers believes to hold; none when nobody holds any."""
        holders = [worker for worker in self.workers if worker.holds]
        if not holders:
            return self.workers[0], []
        worker = data.draw(st.sampled_from(holders))
        return worker, data.draw(st.lists(st.sampled_from(sorted(worker.holds)), unique=True, min_size=1, max_size=4))

    # ---- what holds at any time

    @invariant()
    def every_message_is_where_it_should_be(self) -> None:
        owners: dict[int, str | None] = {}
        for stream in KEYS.streams(QUEUE):
            pending = (
                {
                    each["message_id"]: each["consumer"].decode()
                    for each in self.client.xpending_range(stream, GROUP, "-", "+", 1000)
                }
                if self.client.exists(stream)
                else {}
            )
            entries = self.client.xrange(stream)
            assert set(pending) <= {id_ for id_, _ in entries}, "a pending entry without its message"
            for id_, fields in entries:
                name = pending.get(id_)
                owners[int(fields[b"body"])] = None if name in (None, "@free") else name
        waiting = self.client.zcard(KEYS.due(QUEUE))
        assert waiting == self.client.hlen(KEYS.delayed(QUEUE))
        # Due messages are moved by the next read.
        assert len(owners) + waiting == len(self.alive) + len(self.delayed)
        assert {number: owner for number, owner in self.alive.items() if number in owners} == owners
        letters = [fields for _, fields in self.client.xrange(KEYS.dead(QUEUE))]
        assert {int(fields[b"body"]) for fields in letters} == self.dead
        assert len(letters) == len(self.dead)

    def teardown(self) -> None:
        """Everybody is killed, and one worker empties the queue."""
        for worker in self.workers:
            worker.leases.end()
        self.delayed_ones_are_due()
        last = Worker(self.client)
        for _ in range(self.count + 20):
            self.expire({"@free", *(owner for owner in self.alive.values() if owner not in (None, last.name))})
            reads = last.fetch(10, recover=True)
            self.taken(last, reads, recover=True)
            if not reads and not any(self.client.xlen(stream) for stream in KEYS.streams(QUEUE)):
                break
            last.leases.hold((read.tag, read.entry) for read in reads)
            for read in reads:
                last.leases.ack(read.tag)
                last.acked[read.tag] = number_of(read)
            last.leases.flush()
            self.flushed(last)
        last.leases.end()
        assert self.alive == {}
        self.every_message_is_where_it_should_be()
        assert not any(self.client.xlen(stream) for stream in KEYS.streams(QUEUE))


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.parametrize("name", ["redis_server", "valkey_server"])
def test_a_queue_keeps_its_promises_in_any_order(name: str, request: pytest.FixtureRequest) -> None:
    with request.getfixturevalue(name).client() as client:
        run_state_machine_as_test(
            lambda: Streams(client),
            settings=settings(
                max_examples=60, stateful_step_count=40, deadline=None, phases=[Phase.generate, Phase.shrink],
                database=None, print_blob=True, report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip


def test_a_tag_tells_deliveries_of_one_message_apart() -> None:
    assert Entry(QUEUE, "s", "1-1", 1).tag != Entry(QUEUE, "s", "1-1", 2).tag
