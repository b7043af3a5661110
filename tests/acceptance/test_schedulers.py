"""The same window() under every scheduler of the field: one fire per slot in each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.stage import Stage
from tests.acceptance.test_windows import QUICK, alive
from tests.conftest import Database
from tests.processes import REPOSITORY, eventually, write_module

DJANGO = """
    SECRET_KEY = "of a test"
    INSTALLED_APPS = ["django_celery_beat"]
    DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "{folder}/django.db"}}}}
    USE_TZ = True
    DJANGO_CELERY_BEAT_TZ_AWARE = True
"""


def stock(show: Stage, folder: Path) -> None:
    show.beat("-S", "celery.beat.PersistentScheduler", "-s", str(folder / "schedule"))


def embedded(show: Stage, folder: Path) -> None:
    show.worker("-B", "-s", str(folder / "schedule"), "-c", "2")


def redbeat(show: Stage, folder: Path) -> None:
    show.beat("-S", "redbeat.RedBeatScheduler")


def on_sqlalchemy(show: Stage, folder: Path) -> None:
    show.beat("-S", "sqlalchemy_celery_beat.schedulers:DatabaseScheduler")


def on_django(show: Stage, folder: Path) -> None:
    write_module(folder, DJANGO.format(folder=folder), "of_django")
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    django = {"DJANGO_SETTINGS_MODULE": "of_django", "PYTHONPATH": path}
    migrate = [sys.executable, "-m", "django", "migrate", "-v", "0"]
    subprocess.run(migrate, env={**os.environ, **django}, check=True)
    show.beat("-S", "django_celery_beat.schedulers:DatabaseScheduler", env=django)


def ours(show: Stage, folder: Path) -> None:
    show.beat("-S", "claim")


def ours_embedded(show: Stage, folder: Path) -> None:
    show.worker("-B", "-S", "claim", "-c", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [stock, embedded, redbeat, on_sqlalchemy, on_django, ours, ours_embedded],
    ids=lambda each: each.__name__,
)
def test_every_slot_is_fired_once_under_each_scheduler(
    mariadb: Database, stage: Callable[..., Stage], tmp_path: Path, redis_server: Any, schedule: Callable[..., None]
) -> None:
    settings = {
        **QUICK,
        "redbeat_redis_url": redis_server.url,
        "beat_dburi": f"sqlite:///{tmp_path}/beat.db",
        "beat_max_loop_interval": 1,
    }
    show = stage(mariadb, windows={"work": {"frequency": 2, "concurrency": 2}}, settings=settings)
    show.worker("-c", "4")
    alive(show, 1)

    schedule(show, tmp_path)
    eventually(lambda: show.windows.look().windows["work"].fire_seq >= 5, 40, "five fires")

    history = [run for run in show.windows.history(window="work", limit=1000) if run["consumer_id"] is not None]
    fires = Counter((run["slot_start"], run["consumer_id"]) for run in history)
    slots = sorted({slot for slot, _ in fires})
    assert set(fires.values()) == {1}, "each consumer once per slot"
    assert slots == list(range(slots[0], slots[-1] + 2000, 2000)), "no slot left out"


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["sqla+sqlite", "sqla+mysql", "filesystem"])
def test_windows_run_with_the_database_alone(
    mariadb: Database, celery_processes: Any, tmp_path: Path, broker: str
) -> None:
    """Brokers without a server look for messages once a second."""
    from kombu import Connection

    folder = tmp_path / "messages"
    folder.mkdir()
    url = {
        "sqla+sqlite": f"sqla+sqlite:///{tmp_path}/broker.db",
        "sqla+mysql": f"sqla+{mariadb.url.replace('mysql+mysqldb', 'mysql')}",
        "filesystem": "filesystem://",
    }[broker]
    options = (
        {"data_folder_in": str(folder), "data_folder_out": str(folder), "control_folder": str(tmp_path / "control")}
        if broker == "filesystem"
        else {}
    )
    if broker != "filesystem":
        with Connection(url) as connection:  # processes that start at once would all make its tables
            connection.SimpleQueue("celery_claim").close()
    settings = {**QUICK, "broker_transport_options": options, "worker_enable_remote_control": broker == "filesystem"}
    kinds = {kind: {"frequency": 4, "concurrency": 2, "run_type": kind} for kind in ("auto", "any")}
    show = Stage(mariadb, url, celery_processes, tmp_path, windows=kinds, settings=settings)
    show.add(range(1, 51))
    show.worker("-c", "4")
    alive(show, 1)

    show.beat("-S", "claim")

    show.ended(50, timeout=40)
    eventually(lambda: all(show.windows.history(window=kind, states=["done", "empty"]) for kind in kinds), 20, "runs")
