"""redis-streams:// beside kombu's redis://: the same app and the same worker, on servers of the same kind."""

from __future__ import annotations

import contextlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from celery import Celery

from celery_claim import bulk
from celery_claim.streams.wire.keys import Keys
from tests.processes import CeleryProcess, CeleryProcesses, eventually
from tests.servers import Redis

from . import peers
from .measurement import Case, Ledger, Measurement
from .report import Bar, Figures

STOCK, OURS = "redis", "redis-streams"
POOLS = {
    "solo": ("-P", "solo"),
    "threads": ("-P", "threads", "-c", "8"),
    "prefork": ("-P", "prefork", "-c", "2"),
}
PARTS = ("drain", "publish", "latency", "idle", "depth", "memory", "peers")
PROGRAM = """
import time

import redis
from celery import Celery

app = Celery("bench", broker={broker!r})
app.conf.task_acks_late = True
app.conf.task_ignore_result = True
app.conf.worker_prefetch_multiplier = {prefetch}
notes = redis.Redis.from_url({notes!r})


@app.task
def nothing():
    pass


@app.task
def travelled(sent):
    notes.rpush("seconds", time.time() - sent)
"""
#: Messages that a worker may hold for each of its slots: enough that the broker is what limits it.
PREFETCH = 100
#: What would have it do something else meanwhile.
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
#: A figure counts from here on, as a share of the tasks: what comes before is the worker's start.
WARM = 0.1


@dataclass(frozen=True)
class Size:
    """How much is done for one figure."""

    drained: int
    published: int
    bulk: int
    latency_seconds: float
    idle_seconds: float
    shallow: int
    deep: int


SIZES = {
    "full": Size(10_000, 3000, 30_000, 5.0, 15.0, 1000, 100_000),
    "quick": Size(1500, 300, 3000, 1.0, 2.0, 300, 3000),
}


class Bench:
    """One broker with one app, and what is measured on it."""

    def __init__(self, scheme: str, size: Size, folder: Path) -> None:
        self.scheme, self.size, self.folder = scheme, size, folder
        self.server, self.witness = Redis(appendonly="no"), Redis(appendonly="no")

    @contextlib.contextmanager
    def running(self) -> Iterator[Bench]:
        self.started = CeleryProcesses(self.folder)
        try:
            for server in (self.server, self.witness):
                server.start()
            broker = self.server.url.replace("redis://", f"{self.scheme}://", 1)
            self.program = PROGRAM.format(broker=broker, notes=self.witness.url, prefetch=PREFETCH)
            self.client = self.server.client()
            self.app = Celery("bench", broker=broker, set_as_current=False)
            self.nothing = self.app.task(name="bench.nothing")(_nothing)
            yield self
        finally:
            self.started.close()
            for server in (self.server, self.witness):
                server.stop()

    @contextlib.contextmanager
    def worker(self, *options: str) -> Iterator[CeleryProcess]:
        worker = self.started.worker(self.program, *options, "-l", "WARNING", name="bench", ready=False)
        try:
            yield worker
        finally:
            worker.terminate()

    # ---- what is looked at ----------------------------------------------------------------------------------

    def waiting(self) -> int:
        """Messages that are not acknowledged."""
        if self.scheme == OURS:
            return sum(self.client.xlen(stream) for stream in Keys().streams("celery"))
        return int(self.client.llen("celery")) + int(self.client.hlen("unacked"))

    def server_cpu(self) -> float:
        facts = self.client.info("cpu")
        return float(facts["used_cpu_sys"] + facts["used_cpu_user"])

    @staticmethod
    def worker_cpu(worker: CeleryProcess) -> float:
        process = psutil.Process(worker.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    def fill(self, count: int) -> None:
        """Queue tasks as fast as the broker can."""
        if self.scheme == OURS:
            bulk(self.nothing, ((),) * count)
        else:
            self.publish_batch(count)

    def publish_batch(self, count: int) -> None:
        with self.app.producer_or_acquire() as producer, producer.batch():
            for _ in range(count):
                self.nothing.apply_async(producer=producer)

    # ---- the parts ------------------------------------------------------------------------------------------

    def drain(self, pool: str, count: int, until: int = 0) -> dict[str, float]:
        """Tasks per second, and CPU per task, of a worker that finds `count` queued, until that many are left."""
        self.client.flushdb()
        self.fill(count)
        begin = count - max(1, int((count - until) * WARM))
        with self.worker(*POOLS[pool], *QUIET) as worker:
            eventually(lambda: self.waiting() <= begin, timeout=120)
            first, began = self.waiting(), time.monotonic()
            cpu, server = self.worker_cpu(worker), self.server_cpu()
            eventually(lambda: self.waiting() <= until, timeout=300)
            done, seconds = first - self.waiting(), time.monotonic() - began
            return {
                "tasks_per_second": done / seconds,
                "worker_us": (self.worker_cpu(worker) - cpu) / done * 1e6,
                "server_us": (self.server_cpu() - server) / done * 1e6,
            }

    def publish(self, way: str) -> dict[str, float]:
        """Tasks per second of one publisher."""
        self.client.flushdb()
        count = self.size.bulk if way == "bulk" else self.size.published
        self.nothing.apply_async()
        began = time.monotonic()
        if way == "bulk":
            bulk(self.nothing, ((),) * count)
        elif way == "batch":
            self.publish_batch(count)
        else:
            for _ in range(count):
                self.nothing.apply_async()
        return {"tasks_per_second": count / (time.monotonic() - began)}

    def latency(self) -> dict[str, float]:
        """Milliseconds from `apply_async` to the first line of the task, at 200 tasks a second."""
        self.client.flushdb()
        notes = self.witness.client()
        notes.delete("seconds")
        with self.worker("-P", "threads", "-c", "4"):
            self.app.send_task("bench.travelled", (time.time(),))
            eventually(lambda: notes.llen("seconds"), timeout=60)
            notes.delete("seconds")
            count = int(self.size.latency_seconds * 200)
            began = time.monotonic()
            for number in range(count):
                time.sleep(max(0.0, began + number / 200 - time.monotonic()))
                self.app.send_task("bench.travelled", (time.time(),))
            eventually(lambda: notes.llen("seconds") == count, timeout=60)
        seconds = sorted(float(each) for each in notes.lrange("seconds", 0, -1))
        return {"p50_ms": statistics.median(seconds) * 1000, "p99_ms": seconds[int(count * 0.99)] * 1000}

    def idle(self) -> dict[str, float]:
        """Commands per second of a worker without work, those inside of scripts counted, and its share of a CPU."""
        self.client.flushdb()
        with self.worker(*POOLS["threads"]) as worker:
            self.nothing.apply_async()
            eventually(lambda: self.waiting() == 0, timeout=60)
            commands, cpu = self._commands(), self.worker_cpu(worker)
            began = time.monotonic()
            # This time is what is measured.
            time.sleep(self.size.idle_seconds)
            seconds = time.monotonic() - began
            return {
                "commands_per_second": (self._commands() - commands) / seconds,
                "cpu_share": (self.worker_cpu(worker) - cpu) / seconds,
            }

    def _commands(self) -> int:
        stats = self.client.info("commandstats")
        ours = sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("info", "llen", "hlen", "xlen"))
        return int(sum(each["calls"] for each in stats.values()) - ours)

    def memory(self) -> dict[str, float]:
        """Bytes of the server per queued task, and what is left of them when it is drained."""
        self.client.flushdb()
        # Scripts and the keys of a queue are there once.
        self._fill_and_drain(10)
        empty = self._used()
        full = self._fill_and_drain(count := self.size.drained)
        return {"bytes_per_task": (full - empty) / count, "left_share": max(0, self._used() - empty) / (full - empty)}

    def _fill_and_drain(self, count: int) -> int:
        """What is used between the two."""
        self.fill(count)
        full = self._used()
        with self.worker(*POOLS["threads"]):
            eventually(lambda: self.waiting() == 0, timeout=120)
        return full

    def _used(self) -> int:
        return int(self.client.info("memory")["used_memory_dataset"])


def _nothing() -> None:
    """Stands for the task of the worker's module."""


#: About how long each of them drains.
PEER_SECONDS = 4


def run(*, parts: list[str], quick: bool, rounds: int, path: Path, tell: Callable[[str], object]) -> None:
    """Measure; the brokers take turns within each round, and the figures go to `path` as they come."""
    size = SIZES["quick" if quick else "full"]
    ledger = Ledger(path, conditions())
    for round_ in range(rounds):
        for case, measure in _cases(parts, size):
            for scheme in (STOCK, OURS) if round_ % 2 == 0 else (OURS, STOCK):
                if case.what == "bulk" and scheme == STOCK:
                    continue
                with (
                    tempfile.TemporaryDirectory(prefix="celery_claim-bench-") as folder,
                    Bench(scheme, size, Path(folder)).running() as bench,
                ):
                    facts = measure(bench)
                ledger.add(Measurement(Case(case.part, scheme, case.what, table=case.table), round_, facts))
                shown = ", ".join(f"{name} {value:,.4g}" for name, value in facts.items())
                tell(f"round {round_ + 1}: {case.part} {case.what or case.table} on {scheme}://: {shown}")
    if "peers" in parts:
        run_peers(quick=quick, rounds=rounds, ledger=ledger, tell=tell)


def run_peers(*, quick: bool, rounds: int, ledger: Ledger, tell: Callable[[str], object]) -> None:
    """Jobs that do nothing, eight at a time, drained by Celery on both brokers and by other task queues on Redis."""
    server = Redis(appendonly="no").start()
    try:
        for round_ in range(rounds):
            for peer in peers.BROKER_PEERS[:: 1 if round_ % 2 == 0 else -1]:
                facts = peers.measure(peer, server.url, peer.pace if quick else peer.pace * PEER_SECONDS, 8)
                ledger.add(Measurement(Case("peers", peer.database, peer.name), round_, facts))
                tell(f"round {round_ + 1}: {peer.name}: {facts['rows_per_second']:,.0f} a second")
    finally:
        server.stop()


def _cases(parts: list[str], size: Size) -> Iterator[tuple[Case, Callable[[Bench], dict[str, float]]]]:
    for part in parts:
        if part == "drain":
            for pool in POOLS:
                yield Case(part, "", pool), lambda bench, pool=pool: bench.drain(pool, size.drained)
        elif part == "publish":
            for way in ("one by one", "batch", "bulk"):
                yield Case(part, "", way), lambda bench, way=way: bench.publish(way)
        elif part == "depth":
            for table, count in (("shallow", size.shallow), ("deep", size.deep)):
                until = count - int(size.shallow * 0.9)
                yield (
                    Case(part, "", "solo", table=table),
                    lambda bench, count=count, until=until: bench.drain("solo", count, until),
                )
        elif part != "peers":
            yield Case(part, "", ""), lambda bench, part=part: getattr(bench, part)()


def conditions() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} processors",
        "load": round(psutil.getloadavg()[0], 1),
        "servers": {},
        "packages": {name: version(name) for name in ("celery", "kombu", "redis")},
        "peers": {},
    }


# ---- what came out ----------------------------------------------------------------------------------------------


def bars(figures: Figures) -> list[Bar]:
    """Ratios to redis:// of the same round, beside what was promised."""

    def against_stock(
        part: str, what: str, name: str, limit: float, promise: str, *, at_least: bool = True, **of: str
    ) -> None:
        mine = Case(part, OURS, what, **of)
        base = Case(part, STOCK, "one by one" if part == "publish" else what, **of)
        ratio = figures.ratio(mine, base, name)
        if ratio is not None:
            found.append(Bar(promise, ratio, limit, at_least))

    found: list[Bar] = []
    for pool, limit in (("solo", 5.0), ("threads", 5.0), ("prefork", 2.2)):
        against_stock("drain", pool, "tasks_per_second", limit, f"drain, {pool}")
    for way, limit in (("one by one", 1.3), ("batch", 2.6), ("bulk", 15.0)):
        against_stock("publish", way, "tasks_per_second", limit, f"publish, {way}")
    for name in ("p50_ms", "p99_ms"):
        against_stock("latency", "", name, 1.0, f"round trip at 200/s, {name[:3]}", at_least=False)
    depth = figures.ratio(
        Case("depth", OURS, "solo", table="deep"), Case("depth", OURS, "solo", table="shallow"), "tasks_per_second"
    )
    if depth is not None:
        found.append(Bar("drain of a long queue, to that of a short one", depth, 0.95))
    return found


def limits(figures: Figures) -> list[tuple[str, float, float]]:
    """What was promised as a figure of its own: promise, measured, limit."""
    promised = (
        ("drain", "solo", "worker_us", "worker CPU per task, µs (solo)", 160.0),
        ("drain", "solo", "server_us", "server CPU per task, µs (solo)", 15.0),
        ("idle", "", "commands_per_second", "commands per second of an idle worker", 2.0),
        ("idle", "", "cpu_share", "CPU of an idle worker", 0.01),
        ("memory", "", "bytes_per_task", "bytes per queued task", 600.0),
        ("memory", "", "left_share", "of that left after draining", 0.02),
    )
    found = []
    for part, what, name, promise, limit in promised:
        value = figures.median(Case(part, OURS, what), name)
        if value is not None:
            found.append((promise, value, limit))
    return found


def page(conditions: dict[str, Any], figures: Figures) -> str:
    """The page of the documentation."""
    packages = ", ".join(f"{name} {number}" for name, number in conditions["packages"].items())
    lines = [
        "# Benchmarks of the broker",
        "",
        "`redis-streams://` beside kombu's `redis://`: the same app, the same worker with `task_acks_late`, tasks that",
        "do nothing, servers of the same kind, in turns. A ratio is that of one round; shown is the median round, and",
        "the least and the most. Publishing is compared with one by one on `redis://`. A worker that is drained may",
        f"hold {PREFETCH} messages for each slot (`worker_prefetch_multiplier`), and redis-py parses without hiredis.",
        "",
        f"Measured on {conditions['date']}: Python {conditions['python']}, {conditions['system']}, {packages}; load at",
        f"the start {conditions['load']}. Repeat it with `./dev bench streams`.",
        "",
        "| to redis:// | ratio | promised | |",
        "| --- | --- | --- | --- |",
    ]
    for bar in bars(figures):
        sign = ">=" if bar.at_least else "<="
        lines.append(f"| {bar.promise} | {bar.ratio} | {sign} {bar.limit:g} | {'met' if bar.met else 'not met'} |")
    lines += ["", "| of redis-streams:// | measured | promised | |", "| --- | --- | --- | --- |"]
    for promise, value, limit in limits(figures):
        lines.append(f"| {promise} | {value:.3g} | <= {limit:g} | {'met' if value <= limit else 'not met'} |")
    lines += [*_peer_table(figures), "", "## Figures", "", "| | broker | medians |", "| --- | --- | --- |"]
    for case, by_round in figures.by_case.items():
        if case.part == "peers":
            continue
        names = next(iter(by_round.values()))
        medians = ", ".join(f"{name} {figures.median(case, name):,.3g}" for name in names)
        lines.append(f"| {case.part} {case.what} {case.table} | `{case.database}://` | {medians} |")
    return "\n".join(lines) + "\n"


def _peer_table(figures: Figures) -> list[str]:
    cases = figures.cases("peers")
    if not cases:
        return []
    stock = next(case for case in cases if case.database == STOCK)
    versions = {peer.name: peer.requirements[0].partition("==")[2] for peer in peers.BROKER_PEERS if peer.requirements}
    lines = [
        "",
        "## Beside other task queues on Redis",
        "",
        "One process, eight jobs at a time (threads, or coroutines where a queue has only those); each job appends a",
        "line to a file.",
        "",
        "| | to Celery on redis:// | CPU per job, µs |",
        "| --- | --- | --- |",
    ]
    for case in cases:
        ratio = figures.ratio(case, stock)
        named = f"{case.what} {versions.get(case.what, '')}".strip()
        lines.append(f"| {named} | {ratio} | {figures.median(case, 'cpu_us'):,.0f} |")
    return lines
