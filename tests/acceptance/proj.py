"""The program of the acceptance tests: a table of jobs, and a task that does what each row says and writes down when.

It is run by real workers (`celery -A tests.acceptance.proj worker`); PROJ_* variables of the environment set it up.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from importlib.abc import MetaPathFinder
from typing import Any

from billiard import current_process
from celery import Celery
from sqlalchemy import BigInteger, Engine, Integer, String, event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_claim import Claimable, ClaimTask, window
from celery_claim.signals import claim_lost, row_claimed


def setting(name: str) -> Any:
    """A value given as JSON, or an empty dict."""
    return json.loads(os.environ.get(f"PROJ_{name}", "{}"))


# Not the current app of a test process that imports the table; workers make it theirs.
app = Celery("proj", broker=os.environ.get("PROJ_BROKER", "memory://"), set_as_current=False)
app.conf.update(
    claim_database_url=os.environ.get("PROJ_DATABASE"),
    claim_maintenance_interval=0.5,
    # A fleet that notices a death before the shortest lease of these tests is over.
    claim_node_heartbeat=0.5,
    claim_node_timeout=2.5,
    claim_accept_timeout=1.0,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=True,
)
app.conf.update(setting("SETTINGS"))


class Base(DeclarativeBase): ...


class Job(Claimable, Base):
    __tablename__ = "job"
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    #: What the handler does: "sleep 3", "raise text", "exit" the first time, "die" each time, or nothing.
    work: Mapped[str] = mapped_column(String(100), default="", server_default="")


def note(what: str, **facts: Any) -> None:
    """Add a line to the log of what happened; a line of one write is never torn, whatever dies."""
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.monotonic(), **facts})
    log = os.open(os.environ["PROJ_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"{line}\n".encode())
    os.close(log)


@app.task(base=ClaimTask, model=Job, name="proj.work", **setting("OPTIONS"))
def work(row: Job) -> None:
    """Do what the row says."""
    about = {"id": row.id, "token": row.claim_token, "reclaims": row.reclaim_count, "worker": row.worker_id}
    note("start", **about)
    verb, _, argument = (row.work or "").partition(" ")
    if verb == "sleep":
        time.sleep(float(argument))
    elif verb == "raise":
        raise ValueError(argument)
    elif verb == "die" or (verb == "exit" and once("exit")):
        os.kill(os.getpid(), signal.SIGKILL)
    note("end", **about)


WINDOWS = {"work": setting("WINDOW")} if setting("WINDOW") else setting("WINDOWS")
app.conf.beat_schedule = {name: window(work, **options) for name, options in WINDOWS.items()}


def _claimed(keys: list[Any], **_: Any) -> None:
    note("claimed", keys=keys)


def _lost(keys: list[Any], **_: Any) -> None:
    note("lost", keys=keys)


if "PROJ_LOG" in os.environ:
    # Not in a test's own process, which imports the table.
    row_claimed.connect(_claimed, weak=False)
    claim_lost.connect(_lost, weak=False)


# ---- death at a chosen statement


def once(what: str) -> bool:
    """Whether this is the first process of the test that asks."""
    try:
        os.close(os.open(f"{os.environ['PROJ_LOG']}.{what}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    note("dies", step=what)
    return True


def die_at(moment: str, pattern: str) -> None:
    """End this process with SIGKILL at the first statement of the pattern: before, after, or when it got no answer.

    Only a process that handles rows: the worker's first one looks at the table as well when it starts.
    """

    def strike(statement: str | None) -> None:
        handles = current_process().name != "MainProcess"
        if handles and re.search(pattern, statement or "") and once("statement"):
            os.kill(os.getpid(), signal.SIGKILL)

    if moment == "unanswered":
        event.listen(Engine, "handle_error", lambda context: strike(context.statement))
    else:
        event.listen(Engine, f"{moment}_cursor_execute", lambda *arguments: strike(arguments[2]))


if "moment" in setting("DEATH"):
    die_at(**setting("DEATH"))


class SlowImports(MetaPathFinder):
    """Makes other threads take seconds for each of celery_claim's modules that they are the first to import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.startswith("celery_claim") and threading.current_thread() is not threading.main_thread():
            note("import", module=name)
            time.sleep(3)


if os.environ.get("PROJ_SLOW_IMPORTS"):
    sys.meta_path.insert(0, SlowImports())
