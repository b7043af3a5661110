"""Other job queues, each in a virtual environment of its own, draining jobs that do nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy.engine import make_url

from tests.servers import die_with_parent

from .peer import sink
from .table import ARGUMENTS

HERE = Path(__file__).resolve().parent

#: Seconds after which a drain is judged by what was done until then.
DRAIN_LIMIT = 60

#: Seconds a worker may take to start and finish its first job.
START_LIMIT = 45


@dataclass(frozen=True)
class Peer:
    name: str
    database: str  # the kind of server it lives on here
    requirements: tuple[str, ...]
    adapter: str
    #: Jobs for each second of drain expected: a fast peer gets more jobs, so that each runs long enough to time.
    pace: int
    #: Runs one job at a time in a process: concurrency is that many workers.
    single: bool = False
    django_app: str = ""


DJANGO = ("django==5.2.19", "mysqlclient==2.3.2")

PEERS = (
    Peer(
        "procrastinate",
        "postgresql",
        ("procrastinate==3.10.0", "psycopg[binary,pool]==3.3.9"),
        "procrastinate_adapter.py",
        pace=250,
    ),
    Peer(
        "pgqueuer",
        "postgresql",
        ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"),
        "pgqueuer_adapter.py",
        pace=10_000,
        single=True,
    ),
    Peer(
        "django-tasks-db",
        "mariadb",
        (*DJANGO, "django-tasks-db[compat]==0.13.0", "django-tasks==0.12.0"),
        "django_tasks_db_adapter.py",
        pace=400,
        single=True,
        django_app="django_tasks_db",
    ),
    Peer(
        "django-q2",
        "mariadb",
        (*DJANGO, "django-q2==1.11.1"),
        "django_q2_adapter.py",
        pace=1000,
        django_app="django_q",
    ),
)


#: What is compared with the broker; the first two are Celery itself, in this environment.
BROKER_PEERS = (
    Peer("celery, redis://", "redis", (), "celery_adapter.py", pace=900),
    Peer("celery, redis-streams://", "redis-streams", (), "celery_adapter.py", pace=3000),
    Peer("dramatiq", "redis", ("dramatiq[redis]==2.2.1",), "dramatiq_adapter.py", pace=2500),
    Peer("taskiq-redis, streams", "redis", ("taskiq==0.13.0", "taskiq-redis==1.2.4"), "taskiq_adapter.py", pace=1500),
    Peer("streaq", "redis", ("streaq==7.2.0", "redis==8.1.0"), "streaq_adapter.py", pace=2000),
)


def python(peer: Peer) -> str:
    """The interpreter of the peer's environment, which is made when it is first asked for (about ten seconds)."""
    if not peer.requirements:
        return sys.executable
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "celery_claim" / "peers"
    digest = hashlib.sha256("\n".join((sys.version, *peer.requirements)).encode()).hexdigest()[:8]
    home = cache / f"{peer.name.replace(' ', '')}-{digest}"
    interpreter = str(home / "bin" / "python")
    stamp = home / "complete"
    if not stamp.exists():  # an install that was interrupted is done again
        home.parent.mkdir(parents=True, exist_ok=True)
        venv.create(home, with_pip=True, clear=True)
        command = [interpreter, "-m", "pip", "install", "--disable-pip-version-check", *peer.requirements]
        _call(command, dict(os.environ))
        stamp.touch()
    return interpreter


def measure(peer: Peer, url: str, jobs: int, concurrency: int) -> dict[str, Any]:
    """The rate between the first and the last finished job of a backlog; the worker's start is not counted."""
    with tempfile.TemporaryDirectory(prefix="claim-bench-") as folder:
        environment = _environment(peer, url, concurrency, Path(folder) / "sink")
        command = [python(peer), str(HERE / "peer" / peer.adapter)]
        _call([*command, "reset"], environment)
        _call([*command, "fill", str(jobs)], environment)
        path = environment["BENCH_SINK"]
        Path(path).touch()
        with contextlib.ExitStack() as workers:
            families = [
                workers.enter_context(_worker([*command, "work"], environment, Path(folder) / f"worker{number}.log"))
                for number in range(concurrency if peer.single else 1)
            ]
            _wait(path, 1, START_LIMIT)
            if not sink.count(path):
                raise RuntimeError(f"{peer.name} finished nothing in {START_LIMIT} s:\n{_tail(Path(folder))}")
            before, cpu = sink.count(path), _cpu_seconds(families)
            _wait(path, jobs, DRAIN_LIMIT)
            cpu = _cpu_seconds(families) - cpu
        records = sink.records(path)
    times = sorted(ended for _, ended in records)
    different = len({number for number, _ in records})
    return {
        "handled": different,
        "duplicates": len(records) - different,
        "rows_per_second": (len(times) - 1) / max(1e-9, times[-1] - times[0]),
        "cpu_us": cpu / max(1, len(records) - before) * 1e6,
    }


def _environment(peer: Peer, url: str, concurrency: int, path: Path) -> dict[str, str]:
    plain = make_url(url)
    scheme = {"postgresql": "postgresql", "mariadb": "mysql"}.get(peer.database, peer.database)
    own = {key: value for key, value in os.environ.items() if not key.startswith(("VIRTUAL_ENV", "PYTHON", "DJANGO"))}
    return own | {
        "PYTHONPATH": str(HERE / "peer"),
        "PYTHONUNBUFFERED": "1",
        "BENCH_DATABASE_URL": plain.set(drivername=scheme).render_as_string(hide_password=False),
        "BENCH_SINK": str(path),
        "BENCH_CONCURRENCY": str(concurrency),
        "BENCH_PAYLOAD": ARGUMENTS,
        "BENCH_DJANGO_APP": peer.django_app,
    }


def _call(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


@contextlib.contextmanager
def _worker(command: list[str], environment: dict[str, str], log: Path) -> Iterator[psutil.Process]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            die_with_parent(command), env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        for one in _family(psutil.Process(process.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def _family(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _cpu_seconds(families: list[psutil.Process]) -> float:
    total = 0.0
    for process in (one for family in families for one in _family(family)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _wait(path: str, jobs: int, limit: float) -> None:
    end = time.monotonic() + limit
    while sink.count(path) < jobs and time.monotonic() < end:
        time.sleep(0.02)


def _tail(folder: Path) -> str:
    return "\n".join(log.read_text(errors="replace")[-1000:] for log in sorted(folder.glob("worker*.log")))
