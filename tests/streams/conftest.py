"""Brokers under test: the same promises on Redis and on Valkey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection

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
