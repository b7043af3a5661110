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


MakeStage = Callable[..., Stage]


@pytest.fixture
def make_stage(redis_server: Any, tmp_path: Path, celery_processes: processes.CeleryProcesses) -> Iterator[MakeStage]:
    """make_stage(more) -> an app on Redis with tasks of its own besides `work`."""
    with contextlib.ExitStack() as made:
        yield _maker(redis_server, tmp_path, celery_processes, made)


@pytest.fixture
def make_stage_anywhere(
    server: Any, tmp_path: Path, celery_processes: processes.CeleryProcesses
) -> Iterator[MakeStage]:
    """The same on every server under test."""
    with contextlib.ExitStack() as made:
        yield _maker(server, tmp_path, celery_processes, made)


def _maker(server: Any, folder: Path, started: processes.CeleryProcesses, made: contextlib.ExitStack) -> MakeStage:
    return lambda more="": made.enter_context(contextlib.closing(Stage(server, folder, started, dedent(more))))


@pytest.fixture
def stage(make_stage: MakeStage) -> Stage:
    """An app on Redis with the task `work`."""
    return make_stage()


@pytest.fixture
def stage_anywhere(make_stage_anywhere: MakeStage) -> Stage:
    """The same on every server under test."""
    return make_stage_anywhere()
