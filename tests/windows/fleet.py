"""A fleet without processes: windows of an app on a real database, and nodes that are rows of the register."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from celery import Celery
from sqlalchemy import case, update

from celery_claim.database import Link
from celery_claim.dispatch import Dispatcher
from celery_claim.nodes import leases, registry
from celery_claim.nodes.identity import Identity, Vitals
from celery_claim.schedules import window
from celery_claim.windows.fire import Outcome
from celery_claim.windows.runs import End, Started, end, start
from celery_claim.windows.window import Definition
from tests.conftest import Database

#: An hour: slots so long that no test ever reaches the end of one by itself.
HOUR = 3600


class Fleet:
    """Windows of one app, as several processes of it see them."""

    def __init__(self, database: Database, *, url: str | None = None, **settings: Any) -> None:
        self.url = url or database.url
        self.settings = settings
        self.first = self.dispatcher()
        self.second = self.dispatcher()
        self.tables = self.first.statements.tables
        self.first.prepare()

    def dispatcher(self) -> Dispatcher:
        """The windows as a process of its own sees them."""
        # A broker of its own for each test: kombu's memory transport is one for the process.
        app = Celery("fleet", broker="memory://", set_as_current=False)
        app.conf.update(claim_database_url=self.url, task_default_queue=f"q{uuid4().hex[:8]}", **self.settings)
        return Dispatcher.of(app)

    def link(self) -> Any:
        return self.first.database.linked()

    # ---- windows

    def declare(self, name: str = "w", **options: Any) -> Definition:
        """Declare a window; one of run_type any that needs no node, unless the options say otherwise."""
        options = {"frequency": HOUR, "run_type": "any", **options}
        entry = window("proj.work", name=name, **options)
        definition = Definition.from_entry(name, entry["kwargs"]["window"])
        self.first.register({name: definition})
        return definition

    def fire(self, name: str = "w", *, by: Dispatcher | None = None, patient: bool = False) -> Outcome:
        return (by or self.first).fire([name], patient=patient)[name]

    def trigger(self, name: str = "w") -> Outcome:
        return self.first.trigger(name, by="a test")[0]

    def runs(self, *states: str, **filters: Any) -> list[dict[str, Any]]:
        """Runs with a consumer, oldest first."""
        found = self.first.history(states=states or None, limit=10_000, **filters)
        return [run for run in reversed(found) if run["consumer_id"] is not None]

    def events(self, *states: str) -> list[dict[str, Any]]:
        """Rows of the history that tell of slots without a run, oldest first."""
        found = self.first.history(states=states or None, limit=10_000)
        return [run for run in reversed(found) if run["consumer_id"] is None]

    def window(self, name: str = "w") -> Any:
        return self.first.look().windows[name]

    # ---- runs

    def message(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """What a worker gets of a run."""
        return {key: run[key] for key in ("window", "fire_seq", "node", "consumer_id", "attempt")}

    def start(self, run: Mapping[str, Any], *, node: str = "n1", boot: str = "boot") -> Started | None:
        with self.link() as link:
            timeout = self.first.rules.node_timeout
            return start(link, self.first.statements, self.message(run), node=node, boot_id=boot, node_timeout=timeout)

    def start_all(self, *, node: str = "n1", boot: str = "boot") -> list[Started]:
        """Start every waiting run."""
        started = [self.start(run, node=node, boot=boot) for run in self.runs("pending")]
        return [run for run in started if run is not None]

    def end(self, run: Started, state: str = "done", *, unfinished: bool = False, **counts: int) -> Any:
        with self.link() as link:
            ended = End(state, counts, unfinished=unfinished)
            return end(link, self.first.statements, run, ended, self.first.rules)

    def maintain(self) -> None:
        with self.link() as link:
            self.first.maintain(link)

    # ---- nodes

    def node(self, name: str, *, boot: str | None = None, role: str | None = None, **vitals: Any) -> Identity:
        """Enter a node into the register."""
        identity = Identity(name, role, boot or uuid4().hex)
        with self.link() as link:
            registry.enter(link, self.tables.nodes, identity, self.vitals(**vitals))
        return identity

    @staticmethod
    def vitals(**values: Any) -> Vitals:
        return Vitals(**{"accepting": True, "pool_size": 4, "max_running": 4, "running": 0, **values})

    def make_main(self, node: str) -> None:
        with self.link() as link:
            leases.acquire(link, self.tables.nodes, "main", node, ttl_ms=60_000)

    # ---- time

    def pass_time(self, seconds: float) -> None:
        """Let so much time pass: every stored time lies so much further back. A run's database time goes on."""
        milliseconds = round(seconds * 1000)
        times = {
            self.tables.window: ("last_slot_start", "active_until", "triggered_at"),
            self.tables.run: (
                "slot_start", "start_before", "published_at", "stop_at", "lease_until", "created_at", "started_at",
                "finished_at",
            ),
            self.tables.nodes.node: ("heartbeat_at", "started_at"),
            self.tables.nodes.lease: ("expires_at",),
        }  # fmt: skip
        with self.link() as link:
            for table, names in times.items():
                self._shift(link, table, names, milliseconds)

    @staticmethod
    def _shift(link: Link, table: Any, names: tuple[str, ...], milliseconds: int) -> None:
        # A window that was never fired stays so.
        earlier = {
            table.c[name]: case((table.c[name] > 0, table.c[name] - milliseconds), else_=table.c[name])
            for name in names
        }
        link.execute(update(table).values(earlier))
