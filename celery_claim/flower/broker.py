"""The queues of a redis-streams:// broker as Flower's Broker page and /api/queues/length want them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from celery import current_app
from flower.utils import broker as flowers  # type: ignore[import-untyped]
from kombu import Connection

from celery_claim.autoload import SCHEMES
from celery_claim.streams.look import QueueFacts, look

#: Seconds that a page waits for a connection and for an answer, unless broker_transport_options say otherwise.
TIMEOUTS = {"socket_connect_timeout": 1.0, "socket_timeout": 2.0}


class StreamsBroker:
    """What Flower's views ask: `await broker.queues(names)`."""

    def __init__(self, broker_url: str, broker_options: Any = None, broker_use_ssl: Any = None) -> None:
        self._url, self._ssl = broker_url, broker_use_ssl
        self._options = {**TIMEOUTS, **(broker_options or {})}

    async def queues(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """One row per queue; another thread reads, for the page must not hold up Flower's events."""
        return await asyncio.get_running_loop().run_in_executor(None, self._queues, list(names))

    def _queues(self, names: list[str]) -> list[dict[str, Any]]:
        with self._connection() as connection:
            transport: Any = connection.transport
            facts = look(transport.commands, transport.keys, transport.options.group, names)
        return [_row(each) for each in facts]

    def _connection(self) -> Connection:
        # The app's own knows all addresses of a failover list, of which Flower passes on one.
        connection = current_app.connection(transport_options=self._options)
        if connection.as_uri(include_password=True) == self._url:
            return connection
        connection.release()
        return Connection(self._url, transport_options=self._options, ssl=self._ssl)


def _row(facts: QueueFacts) -> dict[str, Any]:
    idle_since = None
    if facts.last_delivered_ms and not facts.ready and not facts.pending:
        idle_since = datetime.fromtimestamp(facts.last_delivered_ms / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    return {
        "name": facts.queue,
        "messages": facts.ready + facts.pending,
        "messages_ready": facts.ready,
        "messages_unacknowledged": facts.pending,
        "consumers": facts.consumers,
        "idle_since": idle_since,
        "messages_delayed": facts.delayed,
        "messages_dead": facts.dead,
    }


def is_ours(broker_url: str) -> bool:
    """Whether a broker's URL has one of our schemes, such as redis-streams+socket."""
    return broker_url.partition("://")[0].partition("+")[0] in SCHEMES


def install() -> None:
    """Let Flower's factory of brokers make ours for our schemes; its views hold the class, so the class is changed."""
    original = flowers.Broker.__new__
    if getattr(original, "knows_streams", False):
        return

    def make(cls: Any, broker_url: str, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(broker_url):
            return original(cls, broker_url, *args, **kwargs)
        return StreamsBroker(broker_url, kwargs.get("broker_options"), kwargs.get("broker_use_ssl"))

    make.knows_streams = True  # type: ignore[attr-defined]
    flowers.Broker.__new__ = make
