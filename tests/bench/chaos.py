"""Workers, connections and the server of redis-streams:// die at random while tasks are sent and run.

Nothing may be lost, and each repetition must have a cause that the broker documents. The tasks note what they do on a
second server, which nobody touches.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import redis
from celery import Celery

from celery_claim.streams.wire.keys import Keys
from tests.processes import CeleryProcess, CeleryProcesses, eventually
from tests.servers import Redis

LEASE, BLOCK = 2.0, 1.0
#: Each task sleeps up to so many seconds.
LONGEST_TASK = 0.2
POOLS = (("-P", "prefork", "-c", "3"), ("-P", "threads", "-c", "4"), ("-P", "prefork", "-c", "3"))
FAULTS = {"kill a worker": 4, "cut all connections": 4, "kill the server": 2}
#: Between an end and its acknowledgement, and between a fault and its time in our notes.
SLACK = 0.25
#: Longest time until a worker has its connection back, and has gone through what ended meanwhile.
RECONNECT = 8.0

PROGRAM = """
import json
import os
import random
import time

import redis
from celery import Celery, current_task
from celery.worker import state

from celery_claim.signals import lease_lost

app = Celery("chaos", broker={broker!r})
app.conf.task_acks_late = True
app.conf.task_ignore_result = True
app.conf.worker_prefetch_multiplier = 4
app.conf.broker_connection_retry_on_startup = True
app.conf.broker_transport_options = {options!r}
notes = redis.Redis.from_url({notes!r})


def note(kind, number, worker):
    notes.rpush("notes", json.dumps([kind, number, worker, os.getpid(), time.time()]))
    if kind == "end":
        notes.sadd("ended", number)


@app.task
def work(number):
    worker = current_task.request.hostname
    note("start", number, worker)
    time.sleep(random.random() * {longest})
    note("end", number, worker)


@lease_lost.connect
def on_lost(tag, **kwargs):
    for request in list(state.reserved_requests) + list(state.active_requests):
        if request.message.delivery_tag == tag:
            note("lost", int(request.id), request.hostname)
"""


class Run(NamedTuple):
    """One start of a task's body; `end` is None when it never came to its end."""

    worker: str
    start: float
    end: float | None


@dataclass
class Report:
    """What came of it."""

    tasks: int
    rounds: int
    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    sent_again: int = 0
    lost: list[int] = field(default_factory=list)
    #: Cause -> how many runs too many.
    repetitions: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    left_on_the_server: int = 0

    @property
    def passed(self) -> bool:
        return not self.lost and not self.unexplained and not self.left_on_the_server

    def __str__(self) -> str:
        lines = [
            f"{self.tasks} tasks, {self.rounds} rounds, seed {self.seed}, {self.seconds:.0f} s",
            *(f"  {count:4}  {fault}" for fault, count in sorted(self.faults.items())),
            f"lost: {len(self.lost)}  {self.lost[:20] or ''}",
            f"messages left on the server: {self.left_on_the_server}",
            f"sent again by a publisher that got no answer: {self.sent_again}",
            f"runs too many: {sum(self.repetitions.values()) + len(self.unexplained)}",
            *(f"  {count:4}  {cause}" for cause, count in sorted(self.repetitions.items())),
            *(f"  UNEXPLAINED  {line}" for line in self.unexplained[:20]),
        ]
        return "\n".join(lines)


class Storm:
    """One broker, its workers, and what is done to them."""

    def __init__(self, folder: Path, report: Report) -> None:
        self.report = report
        self.choose = random.Random(report.seed)
        # A write that was answered is on the disk.
        self.server, self.witness = Redis(appendfsync="always"), Redis()
        self.started = CeleryProcesses(folder)
        self.workers: dict[str, CeleryProcess] = {}
        self.pools: dict[str, tuple[str, ...]] = {}
        self.killed: dict[str, float] = {}
        #: When connections to the server broke.
        self.cuts: list[float] = []
        self.resent: set[int] = set()
        self._count = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            for server in (self.server, self.witness):
                server.start()
            self.broker = self.server.url.replace("redis://", "redis-streams://", 1)
            options = {"lease_timeout": LEASE, "block_timeout": BLOCK}
            self.program = PROGRAM.format(
                broker=self.broker, notes=self.witness.url, options=options, longest=LONGEST_TASK
            )
            self.notes = self.witness.client()
            self.app = Celery("chaos", broker=self.broker, set_as_current=False)
            self.app.conf.broker_transport_options = options
            for pool in POOLS:
                self.start_worker(pool)
            for worker in self.workers.values():
                worker.wait_ready(60)
            yield
        finally:
            self.started.close()
            for server in (self.server, self.witness):
                server.stop()

    def start_worker(self, pool: tuple[str, ...]) -> None:
        self._count += 1
        name = f"w{self._count}@chaos"
        self.workers[name] = self.started.worker(self.program, "-n", name, *pool, name="chaos", ready=False)
        self.pools[name] = pool

    # ---- tasks ----------------------------------------------------------------------------------------------

    def send(self, numbers: Iterable[int]) -> None:
        """Send tasks; one whose publish got no answer is sent again."""
        for number in numbers:
            while True:
                try:
                    self.app.send_task("chaos.work", (number,), task_id=str(number), retry=False)
                    break
                except Exception:  # an outage of the server has many names
                    self.resent.add(number)
                    self.report.sent_again += 1
                    time.sleep(0.05)

    # ---- faults ---------------------------------------------------------------------------------------------

    def strike(self) -> None:
        fault = self.choose.choices(list(FAULTS), list(FAULTS.values()))[0]
        self.report.faults[fault] += 1
        if fault == "kill a worker":
            name = self.choose.choice(sorted(self.workers))
            worker = self.workers.pop(name)
            worker.kill9()
            self.killed[name] = time.time()
            self.start_worker(self.pools[name])
        elif fault == "cut all connections":
            with self.server.client() as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            self.cuts.append(time.time())
        else:
            self.server.kill9()
            self.cuts.append(time.time())
            self.server.restart()
            self.cuts.append(time.time())

    # ---- the verdict ----------------------------------------------------------------------------------------

    def ended(self) -> int:
        """How many tasks have come to their end."""
        return int(self.notes.scard("ended"))

    def judge(self, sent: int) -> None:
        notes = [json.loads(note) for note in self.notes.lrange("notes", 0, -1)]
        starts: dict[int, list[Run]] = defaultdict(list)
        ends: dict[tuple[int, str], list[float]] = defaultdict(list)
        lost_leases: set[tuple[int, str]] = set()
        for kind, number, worker, _, at in notes:
            if kind == "end":
                ends[number, worker].append(at)
            elif kind == "lost":
                lost_leases.add((number, worker))
        for kind, number, worker, _, at in notes:
            if kind == "start":
                end = next((end for end in ends[number, worker] if end >= at), None)
                starts[number].append(Run(worker, at, end))
        done = {number for number, runs in starts.items() if any(run.end is not None for run in runs)}
        self.report.lost = sorted(set(range(sent)) - done)
        for number, runs in sorted(starts.items()):
            runs.sort(key=lambda run: run.start)
            for run, following in pairwise(runs):
                cause = self._cause(number, run, following, (number, run.worker) in lost_leases)
                if cause is None:
                    around = [cut for cut in self.cuts if run.start - RECONNECT <= cut <= following.start]
                    self.report.unexplained.append(
                        f"task {number}: {run} and again {following}; its worker was killed at "
                        f"{self.killed.get(run.worker)}, connections were cut at {around}"
                    )
                else:
                    self.report.repetitions[cause] += 1

    def _cause(self, number: int, run: Run, following: Run, lease_lost: bool) -> str | None:
        """Why a task was run again: the documented causes, and no others."""
        killed = self.killed.get(run.worker)
        if killed is not None and run.start <= killed + SLACK and killed <= following.start + SLACK:
            if run.end is None:
                return "it ran when its worker was killed"
            if run.end >= killed - SLACK:
                return "it had ended when its worker was killed, its acknowledgement was not sent yet"
            if any(cut - SLACK <= run.end <= cut + RECONNECT for cut in self.cuts if cut <= killed):
                return "it had ended while its worker reconnected, which was killed before it could acknowledge"
        if lease_lost:
            return "its worker did not renew the lease in time"
        if number in self.resent:
            return "it was published twice, for the first had no answer"
        return None


def run(
    *, tasks: int, rounds: int, seed: int, path: Path | None = None, tell: Callable[[str], object] = print
) -> Report:
    """The whole of it; the report also goes to `path` as JSON."""
    report = Report(tasks, rounds, seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="celery_claim-chaos-") as folder:
        storm = Storm(Path(folder), report)
        with storm.running():
            numbers = iter(range(tasks))
            for number in range(rounds):
                share = (number + 1) * tasks // rounds - number * tasks // rounds
                storm.send(islice(numbers, share))
                storm.strike()
                tell(f"round {number + 1}: {storm.ended()} of {(number + 1) * tasks // rounds} done")
                # So that the faults meet workers at work: neither idle nor far behind.
                behind = (number + 1) * tasks // rounds - 4 * tasks // max(rounds, 5)
                with contextlib.suppress(AssertionError):
                    eventually(lambda behind=behind: storm.ended() >= behind, timeout=20)
            with contextlib.suppress(AssertionError):
                eventually(lambda: storm.ended() == tasks, timeout=60)
            with storm.server.client() as client:

                def left() -> int:
                    return sum(client.xlen(stream) for stream in Keys().streams("celery"))

                with contextlib.suppress(AssertionError, redis.RedisError):
                    eventually(lambda: left() == 0, timeout=LEASE * 3 + 10)
                report.left_on_the_server = left()
            storm.judge(tasks)
    report.seconds = time.monotonic() - began
    if path is not None:
        path.write_text(json.dumps({**vars(report), "passed": report.passed}, indent=1))
    return report
