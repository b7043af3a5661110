"""One app on one broker, its workers, and what its tasks noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import redis
from celery import Celery

from celery_claim.streams.wire.keys import Keys
from tests import processes

LEASE, BLOCK = 2.0, 1.0
POOLS = {
    "solo": ("-P", "solo"),
    "threads": ("-P", "threads", "-c", "2"),
    "prefork": ("-P", "prefork", "-c", "2"),
    "gevent": ("-P", "gevent", "-c", "2"),
}
PROGRAM = f"""
import os
import time
import redis
from celery import Celery

app = Celery("streamproj", broker={{broker!r}}, backend={{notes!r}})
app.conf.task_acks_late = True
app.conf.worker_prefetch_multiplier = 2
app.conf.broker_transport_options = {{{{"lease_timeout": {LEASE}, "block_timeout": {BLOCK}}}}}
app.conf.result_expires = 600
notes = redis.Redis.from_url({{notes!r}})

@app.task
def work(number, seconds=0):
    notes.rpush("started", number)
    time.sleep(seconds)
    notes.rpush("done", number)
{{more}}
"""


class Held(NamedTuple):
    """A message that a consumer holds."""

    consumer: str
    #: Milliseconds since it was read or its lease renewed.
    idle: int


class Stage:
    """`more` is added to the app's module, and stands on the names `app`, `notes`, `os` and `time`."""

    def __init__(self, server: Any, folder: Path, started: processes.CeleryProcesses, more: str = "") -> None:
        self.server, self.started = server, started
        # A database of its own: the URL names the broker's, and redis-py lets the URL win over an argument.
        notes = server.url.rpartition("/")[0] + "/2"
        self.broker = server.url.replace("redis://", "redis-streams://", 1)
        program = PROGRAM.format(broker=self.broker, notes=notes, more=more)
        self.module = processes.write_module(folder, program, "streamproj")
        self.notes = redis.Redis.from_url(notes)
        self.app = Celery("streamproj", broker=self.broker, backend=notes)
        self.app.conf.broker_transport_options = {"lease_timeout": LEASE, "block_timeout": BLOCK}
        self.work = self.app.task(name="streamproj.work", bind=False)(_not_run_here)

    def worker(self, name: str, *args: str) -> processes.CeleryProcess:
        return self.started.worker(self.module, "-n", f"{name}@test", "-l", "INFO", *args)

    def send(self, *works: tuple[int, float], **options: Any) -> None:
        for work in works:
            self.app.send_task("streamproj.work", work, **options)

    def noted(self, what: str) -> list[int]:
        return sorted(int(number) for number in self.notes.lrange(what, 0, -1))

    def held(self) -> list[Held]:
        """What consumers hold of the queue `celery`, oldest first."""
        with self.server.client() as client:
            return [
                Held(entry["consumer"].decode(), entry["time_since_delivered"])
                for stream in Keys().streams("celery")
                if client.exists(stream)
                for entry in client.xpending_range(stream, "celery", "-", "+", 100)
            ]

    def cut_connections(self) -> None:
        """Those to the broker only: the tasks' own notes must arrive."""
        with self.server.client() as client:
            for each in client.client_list():
                if each["db"] == "0":
                    client.client_kill_filter(_id=each["id"], skipme=True)

    def close(self) -> None:
        self.app.close()
        self.notes.close()


def _not_run_here(number: int, seconds: float = 0) -> None:
    """Stands for the task of the workers' module."""
