"""Workers that die, freeze or lose their connections at any instant: every row ends, and none twice without cause."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from celery_claim import Status
from tests.acceptance.stage import Stage
from tests.conftest import Database
from tests.processes import CeleryProcess, eventually
from tests.proxy import Proxy

CANDIDATES = r"^SELECT job\.id\s+FROM job\s+WHERE job\.status = 0"
CLAIM = r"^UPDATE job .*SET status=1,"
WRITE_BACK = r"^UPDATE job .*SET status=2,"


@dataclass(frozen=True)
class Death:
    """When a worker process dies in the first of two rows, and what that costs."""

    moment: str
    statement: str = ""
    #: How often the first row's handler is started.
    starts: int = 1
    #: How many rows lose their owner.
    reclaims: int = 2


DEATHS = {
    "after the candidates": Death("after", CANDIDATES, reclaims=0),
    "before the claim is sent": Death("before", CLAIM, reclaims=0),
    "after the claim is done and not answered": Death("unanswered", CLAIM),
    "after the claim is answered": Death("after", CLAIM),
    "in the handler": Death("handler", starts=2),
    "before the write back is sent": Death("before", WRITE_BACK, starts=2),
    "after the write back is done and not answered": Death("unanswered", WRITE_BACK, reclaims=1),
    "after the write back is answered": Death("after", WRITE_BACK, reclaims=1),
}


#: PostgreSQL claims and asks for the answers in other statements; the rest is the same code.
DIFFERENT = ("before the claim is sent", "after the claim is done and not answered", "after the claim is answered")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "step"), [("mariadb", step) for step in DEATHS] + [("postgresql", step) for step in DIFFERENT]
)
def test_a_worker_that_dies_at_any_step_loses_no_row(
    request: pytest.FixtureRequest, stage: Callable[..., Stage], proxied: Callable[[Database], Proxy], kind: str,
    step: str,
) -> None:  # fmt: skip
    death = DEATHS[step]
    database = request.getfixturevalue(kind)
    proxy = proxied(database)
    by_statement = {"moment": death.moment, "pattern": death.statement} if death.statement else {}
    show = stage(database, url=proxy.url, lease_seconds=2, death=by_statement)
    show.add([1], work="exit" if death.moment == "handler" else "")
    show.add([2])
    worker = show.worker("-c", "1")
    if death.moment == "unanswered":
        proxy.swallow_reply(death.statement.encode())

    assert show.driven(2) == {Status.SUCCEEDED: 2}

    assert len(show.happened("dies")) == 1, worker.log()
    assert show.starts() == {1: death.starts, 2: 1}
    assert sum(show.column("reclaim_count").values()) == death.reclaims


@pytest.mark.slow
def test_a_pool_process_that_replaces_a_dead_one_works_whatever_the_maintenance_was_doing_at_the_fork(
    mariadb: Database, stage: Callable[..., Stage]
) -> None:
    """A fork copies locks, such as that of a module in the middle of its import, but not the thread that holds them."""
    show = stage(mariadb, settings={"claim_maintenance_interval": 0.1})
    worker = show.worker("-c", "1", env={"PROJ_SLOW_IMPORTS": "1"})
    maintained_at = time.monotonic()
    eventually(lambda: time.monotonic() > maintained_at + 0.5)  # the maintenance has begun
    [child] = worker.children()
    os.kill(child, signal.SIGKILL)
    eventually(lambda: worker.children() not in ([], [child]), what="a new pool process")
    show.add([1])

    assert show.driven(1, timeout=15) == {Status.SUCCEEDED: 1}


LEASE = 2
ROUNDS = 30


@dataclass
class Storm:
    """Workers, and what was done to them."""

    show: Stage
    proxy: Proxy
    choose: random.Random
    workers: dict[str, CeleryProcess] = field(default_factory=dict)
    #: Name of the worker -> when it was killed, or stopped and continued.
    faults: list[tuple[str, float]] = field(default_factory=list)
    frozen: dict[str, float] = field(default_factory=dict)
    started: int = 0

    def start(self) -> None:
        self.started += 1
        name = f"storm{self.started}@test"
        self.workers[name] = self.show.worker("-c", "2", "-n", name, ready=False)

    def strike(self) -> str:
        """Do something bad to somebody; what it was."""
        kind = self.choose.choice(["kill", "freeze", "cut"])
        standing = [name for name in self.workers if name not in self.frozen and self.is_ready(name)]
        if kind == "cut" or not standing:
            self.proxy.cut()
            return "cut"
        name = self.choose.choice(standing)
        self.faults.append((name, time.monotonic()))
        if kind == "kill":
            self.workers.pop(name).kill9()
            self.start()
        else:
            self.workers[name].stop_signal(signal.SIGSTOP)
            self.frozen[name] = time.monotonic() + self.choose.uniform(0.2, 2.5 * LEASE)
        return f"{kind} {name}"

    def is_ready(self, name: str) -> bool:
        return " ready." in self.workers[name].log()

    def thaw(self, *, all_of_them: bool = False) -> None:
        for name, until in list(self.frozen.items()):
            if all_of_them or time.monotonic() >= until:
                self.workers[name].stop_signal(signal.SIGCONT)
                self.faults.append((name, time.monotonic()))
                del self.frozen[name]

    def hit(self, owner: str, since: float, until: float) -> bool:
        """Whether a worker was killed, or was frozen at some instant, between two times."""
        node = owner.rsplit("-c", 1)[0]
        return any(name == node and since <= at <= until for name, at in self.faults)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["mariadb", "postgresql"])
def test_thirty_rounds_of_kills_freezes_and_cuts_lose_no_row_and_repeat_none_without_cause(
    request: pytest.FixtureRequest, stage: Callable[..., Stage], proxied: Callable[[Database], Proxy], kind: str
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    database = request.getfixturevalue(kind)
    proxy = proxied(database)
    show = stage(
        database, url=proxy.url, lease_seconds=LEASE, batch_size=5, max_reclaims=None,
        window={"frequency": 1.0, "concurrency": 4},
    )  # fmt: skip
    storm = Storm(show, proxy, random.Random(seed))
    for _ in range(3):
        storm.start()
    show.beat()
    eventually(lambda: all(storm.is_ready(name) for name in storm.workers), timeout=60)
    rows = 0

    for number in range(ROUNDS):
        show.add(range(rows + 1, rows + 11), work="sleep 0.1")
        rows += 10
        pause = time.monotonic() + storm.choose.uniform(0.1, 1.5)
        eventually(lambda pause=pause: time.monotonic() >= pause)
        storm.thaw()
        print(f"round {number}: {storm.strike()}")
    storm.thaw(all_of_them=True)

    assert show.ended(rows, timeout=60 + 10 * LEASE) == {Status.SUCCEEDED: rows}
    starts: dict[int, list[dict[str, Any]]] = {}
    for each in show.happened("start"):
        starts.setdefault(each["id"], []).append(each)
    assert set(starts) == set(range(1, rows + 1))
    again = 0
    for of_row in starts.values():
        of_row.sort(key=lambda each: each["reclaims"])
        for first, second in pairwise(of_row):
            again += 1
            assert first["token"] != second["token"]
            assert second["reclaims"] > first["reclaims"], (first, second, "taken from a live owner")
            until = max(first["at"], second["at"])
            assert storm.hit(first["worker"], first["at"] - LEASE, until), (first, second, storm.faults)
    print(f"{again} of {rows} rows were started again; {sum(show.column('reclaim_count').values())} lost an owner")
    for name, worker in storm.workers.items():
        assert worker.running, name
        assert "Traceback" not in worker.log(), worker.log()[-3000:]
