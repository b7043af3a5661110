"""One program with its database, broker and processes, for the acceptance tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from celery import Celery
from sqlalchemy import Engine, Row, event, func, insert, select

from celery_claim import Status
from celery_claim import window as declare
from celery_claim.dispatch import Dispatcher
from celery_claim.windows.window import Definition
from tests.acceptance import proj
from tests.conftest import Database
from tests.processes import REPOSITORY, CeleryProcess, CeleryProcesses, eventually

PROGRAM = "tests.acceptance.proj"
JOBS = proj.Job.__table__


class Stage:
    """The table `job` on a database, and workers of tests/acceptance/proj.py that work on it."""

    def __init__(
        self, database: Database, broker: str, processes: CeleryProcesses, folder: Path, *,
        url: str | None = None, window: Mapping[str, Any] | None = None,
        windows: Mapping[str, Mapping[str, Any]] | None = None, settings: Mapping[str, Any] | None = None,
        death: Mapping[str, str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """`options` are those of the task; `url` leads to the database by another way, such as a proxy."""
        self.database = database
        self.broker = broker
        self.processes = processes
        self.log_path = folder / "happened.jsonl"
        self.environment = {
            "PROJ_DATABASE": url or database.url,
            "PROJ_BROKER": broker,
            "PROJ_LOG": str(self.log_path),
            "PROJ_OPTIONS": json.dumps(options),
            "PROJ_WINDOW": json.dumps(window or {}),
            "PROJ_WINDOWS": json.dumps(windows or {}),
            "PROJ_SETTINGS": json.dumps(settings or {}),
            "PROJ_DEATH": json.dumps(death or {}),
        }
        self._declared = {"work": window} if window else dict(windows or {})
        self.engine: Engine = database.engine()
        if database.name == "sqlite":
            # The test's own writes wait for the workers', as any program's on SQLite must.
            event.listen(self.engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout=20000"))
        proj.Base.metadata.create_all(self.engine)
        self._sender = Celery("sender", broker=broker, set_as_current=False)
        self._sender.conf.update(claim_database_url=database.url, **(settings or {}))
        self._workers = 0

    @property
    def windows(self) -> Dispatcher:
        """The windows of the program, as another process of the same app sees them."""
        return Dispatcher.of(self._sender)

    def declared(self) -> dict[str, Definition]:
        """The windows of the program."""
        entries = {name: declare("proj.work", name=name, **options) for name, options in self._declared.items()}
        return {name: Definition.from_entry(name, entry["kwargs"]["window"]) for name, entry in entries.items()}

    # ---- processes

    def worker(self, *arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> CeleryProcess:
        """A real worker; each has a name of its own."""
        self._workers += 1
        name = () if any(each.startswith("-n") for each in arguments) else ("-n", f"w{self._workers}@test")
        environment = {**self.environment, **(env or {})}
        # Greeting the neighbours takes a second, and these have none to talk to.
        alone = ("--without-mingle", "--without-gossip")
        return self.processes.worker(PROGRAM, *name, *alone, *arguments, env=environment, **options)

    def beat(self, *arguments: str, env: Mapping[str, str] | None = None) -> CeleryProcess:
        return self.processes.beat(PROGRAM, *arguments, env={**self.environment, **(env or {})})

    def command(self, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """`celery -A proj ...`, run to its end."""
        environment = {**os.environ, **self.environment, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "celery", "-A", PROGRAM, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)

    def send(
        self, consumers: int = 1, *, task: str = "proj.work", queue: str | None = None, **claim: Any
    ) -> None:  # fmt: skip
        """Publish that many drains."""
        for number in range(consumers):
            place = {"consumer_id": number, "consumers": consumers, **claim}
            self._sender.send_task(task, kwargs={"claim": place}, queue=queue, ignore_result=True)

    def driven(self, rows: int, *, consumers: int = 1, timeout: float = 60, **claim: Any) -> dict[Status, int]:
        """Publish drains every second, as a beat would, until that many rows have ended; the states then."""
        end = time.monotonic() + timeout
        while True:
            self.send(consumers, **claim)
            with contextlib.suppress(AssertionError):
                return self.ended(rows, timeout=1)
            if time.monotonic() > end:
                return self.ended(rows, timeout=0)

    # ---- rows

    def add(self, ids: Iterable[int], work: str = "", **values: Any) -> None:
        rows = [{"id": number, "work": work, **values} for number in ids]
        with self.engine.begin() as connection:
            connection.execute(insert(JOBS), rows)

    def row(self, number: int) -> Row[Any]:
        with self.engine.connect() as connection:
            return connection.execute(select(JOBS).where(JOBS.c.id == number)).one()

    def states(self) -> dict[Status, int]:
        """How many rows are in each state."""
        counted = select(JOBS.c.status, func.count()).group_by(JOBS.c.status)
        with self.engine.connect() as connection:
            return {Status(status): count for status, count in connection.execute(counted)}

    def column(self, name: str) -> dict[int, Any]:
        """The values of a column, by row."""
        with self.engine.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(select(JOBS.c.id, JOBS.c[name]))}

    def ended(self, rows: int, timeout: float = 60) -> dict[Status, int]:
        """Wait until that many rows have succeeded or failed and none is anything else; the states then."""

        def done() -> dict[Status, int]:
            states = self.states()
            over = states.get(Status.SUCCEEDED, 0) + states.get(Status.FAILED, 0)
            return states if over == rows == sum(states.values()) else {}

        return eventually(done, timeout, f"the end of {rows} rows (now {self.states()})")

    # ---- what happened

    def happened(self, what: str) -> list[dict[str, Any]]:
        """What the processes wrote down of one kind, in its order."""
        if not self.log_path.exists():
            return []
        lines = self.log_path.read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["what"] == what]

    def starts(self) -> Counter[int]:
        """How often the handler was started for each row."""
        return Counter(each["id"] for each in self.happened("start"))

    def started(self, number: int, times: int = 1, timeout: float = 30) -> dict[str, Any]:
        """Wait until the handler of a row was started that often; the last start."""

        def seen() -> list[dict[str, Any]]:
            found = [each for each in self.happened("start") if each["id"] == number]
            return found if len(found) >= times else []

        return eventually(seen, timeout, f"start {times} of row {number}")[-1]
