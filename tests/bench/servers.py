"""The databases under test, with the durability of a default installation and memory for a million rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests import servers


class MariaDB(servers.MariaDB):
    # The defaults of the tests' own server would make the depth figures measure its small buffers.
    options = (*servers.MariaDB.options, "--innodb-buffer-pool-size=512M")


KINDS: dict[str, type[servers.DatabaseServer]] = {"mariadb": MariaDB, "postgresql": servers.PostgreSQL}
DATABASE = "claim_bench"


@contextlib.contextmanager
def running(names: list[str]) -> Iterator[dict[str, servers.DatabaseServer]]:
    """Servers by name, each with an empty database; stopped at the end of the block."""
    started: dict[str, servers.DatabaseServer] = {}
    try:
        for name in names:
            started[name] = KINDS[name]()
            started[name].start()
            started[name].create_database(DATABASE)
        yield started
    finally:
        for server in started.values():
            server.stop()
