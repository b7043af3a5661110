"""`python -m tests.bench rows`: the claim loop against the bare statements and against other job queues."""

from __future__ import annotations

import datetime
import itertools
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.servers import DatabaseServer

from . import claim_task, depth, peers, raw, table
from .crew import Crew, Turn, rows_per_second
from .measurement import CORE, ORM, RAW, RAW_OFFSETS, Case, Ledger, Measurement
from .model import WORK
from .servers import DATABASE, running

#: Seconds that a drain should last: long enough for a figure, short enough to alternate often.
DRAIN_SECONDS = 1.5


class Plan:
    """The cases of one run, and how many rows each of them gets."""

    def __init__(self, *, parts: list[str], databases: list[str], quick: bool, only_peers: list[str]) -> None:
        self.quick = quick
        self.databases = databases
        self.peers = [
            peer for peer in peers.PEERS if "peers" in parts and peer.name in only_peers and peer.database in databases
        ]
        self.crew_size = 2 if quick else 8
        self.cases = [case for part in parts for case in getattr(self, f"_{part}")()]

    def _loop(self) -> Iterator[Case]:
        shapes = [(20, "row"), (100, "batch")] if self.quick else itertools.product((20, 100), ("row", "batch"))
        for database, (batch, done), consumers in itertools.product(self.databases, shapes, (1, self.crew_size)):
            yield Case("loop", database, RAW, batch, done, consumers)
            if consumers > 1 and database == "mariadb":
                yield Case("loop", database, RAW_OFFSETS, batch, done, consumers)
            for what in (CORE, ORM):
                yield Case("loop", database, what, batch, done, consumers)

    def _peers(self) -> Iterator[Case]:
        for consumers in (1, 2 if self.quick else 4):
            for peer in self.peers:
                yield Case("peers", peer.database, peer.name, consumers=consumers)
            for database in self.databases if self.peers else ():
                yield Case("peers", database, CORE, 100, "batch", consumers)

    def _depth(self) -> Iterator[Case]:
        for database in self.databases:
            for batch in (20, 100):
                for held in depth.TABLES:
                    for what in (RAW, CORE):
                        yield Case("depth", database, what, batch, table=held)

    def rows(self, case: Case) -> int:
        if self.quick:
            return 400
        if case.part == "peers" and case.what != CORE:
            pace = next(peer.pace for peer in self.peers if peer.name == case.what)
            return max(500, int(pace * DRAIN_SECONDS))
        if case.done == "row":
            return 3_000
        # Eight consumers have eight batches in view; the end, where they meet, must not be most of the drain.
        return 10_000 if case.consumers == 1 else 20_000


def run(plan: Plan, *, rounds: int, path: Path, tell: Callable[[str], None]) -> Ledger:
    """Measure every case once a round, every second round backwards, and keep each figure in `path`."""
    for peer in plan.peers:
        tell(f"environment of {peer.name}")
        peers.python(peer)
    with running(plan.databases) as servers, Crew(plan.crew_size) as crew:
        ledger = Ledger(path, conditions(servers))
        urls = {name: server.url(DATABASE) for name, server in servers.items()}
        peer_urls = {name: server.create_database(f"{DATABASE}_peers") for name, server in servers.items()}

        def measured(case: Case) -> dict[str, Any]:
            if case.part == "peers" and case.what != CORE:
                peer = next(peer for peer in plan.peers if peer.name == case.what)
                return peers.measure(peer, peer_urls[case.database], plan.rows(case), case.consumers)
            return drain(crew, urls[case.database], case, plan.rows(case))

        for part in ("loop", "peers"):
            for round_, case in _alternated(plan.cases, part, rounds):
                _keep(ledger, case, round_, measured(case), tell)
        # Last, and one database after the other: a server that has just taken millions of rows goes on writing
        # for a while, and every figure taken meanwhile would tell of that.
        for database in plan.databases:
            mine = [case for case in plan.cases if case.part == "depth" and case.database == database]
            if mine:
                tell(f"tables for depth on {database}")
                tables = depth.Depth(urls[database], plan.quick)
                for round_ in range(rounds):
                    for case, facts in tables.measure(mine):
                        _keep(ledger, case, round_, facts, tell)
                tables.drop()
    return ledger


def drain(crew: Crew, url: str, case: Case, rows: int) -> dict[str, Any]:
    """One drain of a fresh table; raises RuntimeError when a row was left or done by two."""
    table.create(url, WORK)
    table.fill(url, WORK, rows + case.consumers)  # each consumer warms up on one
    with tempfile.TemporaryDirectory(prefix="claim-bench-") as folder:
        path = Path(folder) / "sink" if case.part == "peers" else None
        if case.what in (RAW, RAW_OFFSETS):
            arguments = (url, WORK.name, case.batch, case.done, case.what == RAW_OFFSETS)
            turns = crew.run(case.consumers, raw.prepare, *arguments)
        else:
            arguments = (url, case.batch, case.done, "orm" if case.what == ORM else "core", path)
            turns = crew.run(case.consumers, claim_task.prepare, *arguments)
    handled, left = sum(turn.facts["handled"] for turn in turns), table.states(url, WORK)
    if handled != rows or left != {2: rows + case.consumers}:
        raise RuntimeError(f"{case}: {rows} rows, handled {handled}, and then by state {left}")
    return {"rows": rows, **_figures(turns, rows)}


def _figures(turns: list[Turn], rows: int) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "handled": sum(turn.facts["handled"] for turn in turns),
        "rows_per_second": rows_per_second(turns, rows),
        "cpu_us": sum(turn.cpu_seconds for turn in turns) / rows * 1e6,
    }
    candidates = sum(turn.facts.get("candidates", 0) for turn in turns)
    if candidates:
        figures["lost_share"] = sum(turn.facts["lost"] for turn in turns) / candidates
    return figures


def _alternated(cases: list[Case], part: str, rounds: int) -> Iterator[tuple[int, Case]]:
    mine = [case for case in cases if case.part == part]
    for round_ in range(rounds):
        for case in mine if round_ % 2 == 0 else mine[::-1]:
            yield round_, case


def _keep(ledger: Ledger, case: Case, round_: int, facts: dict[str, Any], tell: Callable[[str], None]) -> None:
    facts["load"] = round(os.getloadavg()[0], 2)
    ledger.add(Measurement(case, round_, facts))
    shape = " ".join(str(part) for part in (case.table, case.batch or "", case.done) if part)
    figure = f"{facts['ms']:.2f} ms" if "ms" in facts else f"{facts['rows_per_second']:,.0f}/s"
    tell(f"round {round_ + 1}  {case.database:<10}  {case.what:<20}  {shape:<28}  x{case.consumers}  {figure}")


def conditions(servers: dict[str, DatabaseServer]) -> dict[str, Any]:
    """What a reader must know to judge the figures."""
    packages = ("celery", "SQLAlchemy", "mysqlclient", "psycopg")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "servers": {name: _server_version(server) for name, server in servers.items()},
        "packages": {name: version(name) for name in packages},
        "peers": {peer.name: list(peer.requirements) for peer in peers.PEERS},
    }


def _server_version(server: DatabaseServer) -> str:
    ((found,),) = server.admin("SELECT version()")
    return re.findall(r"\d+\.[\d.]+\d", str(found))[0]
