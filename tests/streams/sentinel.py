"""A master, a replica, and three sentinels that watch them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

from tests.servers import PASSWORD, Redis, Sentinel, wait_until


class Sentinels:
    """`url` leads to the master through the sentinels, with `options` as transport options."""

    options: ClassVar[dict[str, Any]] = {
        "master_name": Sentinel.master_name,
        "sentinel_kwargs": {"password": Sentinel.password},
    }

    def __init__(self) -> None:
        self.master = Redis(masterauth=PASSWORD).start()
        self.replica = Redis(replicaof=f"127.0.0.1 {self.master.port}", masterauth=PASSWORD).start()
        wait_until(self.replicated, "the replica")
        self.sentinels = [Sentinel(self.master).start() for _ in range(3)]
        wait_until(
            lambda: all(sentinel.knows(replicas=1, sentinels=2) for sentinel in self.sentinels), "what sentinels know"
        )

    @property
    def url(self) -> str:
        places = [f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels]
        first = f"sentinel-streams://:{PASSWORD}@{places[0]}/0"
        return ";".join([first, *(f"sentinel-streams://{place}" for place in places[1:])])

    def replicated(self) -> bool:
        """Whether the replica has everything that the master has."""
        with self.master.client() as client:
            facts = client.info("replication")
        states = [facts[name] for name in facts if name.startswith("slave") and isinstance(facts[name], dict)]
        return any(
            state["state"] == "online" and state["offset"] >= facts["master_repl_offset"] - 14 for state in states
        )

    def failed_over(self) -> bool:
        with self.replica.client() as client:
            return bool(client.info("replication")["role"] == "master")

    def stop(self) -> None:
        for server in (*self.sentinels, self.replica, self.master):
            server.stop()


@contextlib.contextmanager
def watched() -> Iterator[Any]:
    running = Sentinels()
    try:
        yield running
    finally:
        running.stop()
