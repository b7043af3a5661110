"""Brokers under test: the same promises on Redis and on Valkey."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from kombu import Connection

from tests import processes
from tests.streams.stage import Stage

SERVERS = ("redis_server", "valkey_server")


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Any:
    """An empty server: .url, .client()."""
    return request.getfixturevalue(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "server" in getattr(item, "fixturenames", ()):
            item.add_marker("servers")


@pytest.fixture
def broker_url(server: Any) -> str:
    return str(server.url).replace("redis://", "redis-streams://", 1)


@pytest.fixture
def connect(broker_url: str) -> Iterator[Callable[..., Connection]]:
    """connect(**transport_options) -> a kombu connection to our broker, closed with the test."""
    opened: list[Connection] = []

    def open_connection(**options: Any) -> Connection:
        connection = Connection(broker_url, transport_options={"block_timeout": 0.5, **options})
        opened.append(connection)
        return connection

    yield open_connection
    for connection in opened:
        connection.release()


@pytest.fixture
def make_stage(
    redis_server: Any, tmp_path: Path, celery_processes: processes.CeleryProcesses
) -> Iterator[Callable[..., Stage]]:
    """make_stage(more) -> an app on Redis with tasks of its own besides `work`."""
    made: list[Stage] = []

    def make(more: str = "") -> Stage:
        made.append(Stage(redis_server, tmp_path, celery_processes, dedent(more)))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


@pytest.fixture
def stage_anywhere(server: Any, tmp_path: Path, celery_processes: processes.CeleryProcesses) -> Iterator[Stage]:
    """The same on every server under test."""
    with contextlib.closing(Stage(server, tmp_path, celery_processes)) as stage:
        yield stage


@pytest.fixture
def stage(make_stage: Callable[..., Stage]) -> Stage:
    """An app on Redis with the task `work`."""
    return make_stage()
