"""Fixtures every test may use; tests/README.md introduces them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import celery._state
import celery.app.builtins
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import NullPool

from tests import processes
from tests.proxy import Proxy
from tests.servers import (
    DATABASE_PREFIX,
    KINDS,
    DatabaseServer,
    MariaDB,
    MissingServer,
    MySQL56,
    PostgreSQL,
    Servers,
    end_with_parent,
)

#: Every database under test and what it can, for tests that ask by capability:
#: network (behind a TCP port) · row_locks (two writers at once) · mysql · skip_locked · returning (of UPDATE) ·
#: time_zone (sessions have one) · isolation (READ COMMITTED and REPEATABLE READ).
CAPABILITIES = {
    **{kind.name: kind.capabilities for kind in (MariaDB, MySQL56, PostgreSQL)},
    "sqlite": frozenset({"returning"}),
}
DATABASES = tuple(CAPABILITIES)
SERVER_FIXTURES = {*KINDS, "redis_server", "valkey_server"}


# ---- options --------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("celery_claim")
    group.addoption("--fast", action="store_true", help="leave out the tests marked slow")
    group.addoption(
        "--databases", default=",".join(DATABASES), help="comma separated: run `database` tests on these only"
    )


def pytest_configure(config: pytest.Config) -> None:
    unknown = set(config.getoption("--databases").split(",")) - set(DATABASES)
    if unknown:
        raise pytest.UsageError(f"--databases: unknown {sorted(unknown)}; known: {', '.join(DATABASES)}")

    if hasattr(config, "workerinput"):
        # An xdist worker whose controller was killed would otherwise sit out the test it is in.
        end_with_parent()

    def leave(number: int, frame: Any) -> None:
        pytest.exit(f"ended by {signal.Signals(number).name}", returncode=128 + number)

    # Python's own answer to these is to end at once, which would skip the clean-up of every fixture.
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks that are set here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        callspec = getattr(item, "callspec", None)
        database = callspec.params.get("database", "sqlite") if callspec else "sqlite"
        if fixtures & SERVER_FIXTURES or database != "sqlite":
            item.add_marker("servers")
    if config.getoption("--fast"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "database" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--databases").split(",")
        needed = {need for mark in metafunc.definition.iter_markers("needs") for need in mark.args}
        names = [name for name, can in CAPABILITIES.items() if name in chosen and can >= needed]
        metafunc.parametrize("database", names, indirect=True)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """A test may log text that no encoding has (lone surrogates); xdist would end its worker over it."""
    return _encodable((yield))


def _encodable(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode()
    if isinstance(data, dict):
        return {key: _encodable(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(_encodable(value) for value in data)
    return data


@pytest.fixture(autouse=True)
def _elbow_room(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test marked `alone` runs while no other xdist worker runs a test: what it measures is its own."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    shared = tmp_path_factory.getbasetemp().parent
    alone = request.node.get_closest_marker("alone") is not None
    with open(shared / "turnstile", "w") as turnstile, open(shared / "room", "w") as room:
        # Everybody passes the turnstile; who wants the room alone holds it until the others have left.
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        yield


#: What Celery itself adds to every app.
CELERYS_OWN = frozenset(celery._state._on_app_finalizers)


@pytest.fixture(autouse=True)
def _apps_of_one_test_only() -> Iterator[None]:
    """Celery copies all shared tasks made before into each app that finalizes: those of other tests and modules too."""
    callbacks = celery._state._on_app_finalizers
    before = set(callbacks)
    callbacks.intersection_update(CELERYS_OWN)
    yield
    callbacks.clear()
    callbacks.update(before)


# ---- servers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The real servers, started when first asked for: servers.get("redis"). One set per xdist worker."""
    running = Servers()
    yield running
    running.stop()


def _get(servers: Servers, name: str) -> Any:
    try:
        return servers.get(name)
    except MissingServer as missing:
        if os.environ.get("CI", "").lower() in ("", "0", "false"):
            pytest.skip(str(missing))
        pytest.fail(str(missing), pytrace=False)


@dataclass
class Database:
    """A fresh, empty database for one test."""

    name: str
    url: str
    server: Any
    capabilities: frozenset[str]
    schema: str
    _engines: list[Engine] = field(default_factory=list)

    def can(self, *capabilities: str) -> bool:
        return self.capabilities.issuperset(capabilities)

    def need(self, *capabilities: str) -> None:
        """Skip the test on a database that lacks one of them; the reason names it."""
        missing = sorted(set(capabilities) - self.capabilities)
        if missing:
            pytest.skip(f"{self.name} has no {', '.join(missing)}")

    def engine(self, *, url: str | None = None, **options: Any) -> Engine:
        """A plain SQLAlchemy engine for the test's own eyes, disposed of at the end; `url` may lead through a proxy."""
        engine = create_engine(url or self.url, **{"poolclass": NullPool, **options})
        self._engines.append(engine)
        return engine

    def admin(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements in this database as the server's superuser."""
        assert self.server is not None, "sqlite has no superuser"
        return list(self.server.admin(*statements, database=self.schema))


@contextlib.contextmanager
def _fresh_database(servers: Servers, name: str, folder: Path) -> Iterator[Database]:
    if name == "sqlite":
        path = folder / "claim.sqlite"
        database = Database(name, f"sqlite:///{path}", None, CAPABILITIES[name], "main")
        yield database
        for engine in database._engines:
            engine.dispose()
        return
    server: DatabaseServer = _get(servers, name)
    schema = f"{DATABASE_PREFIX}{uuid.uuid4().hex[:12]}"
    database = Database(name, server.create_database(schema), server, server.capabilities, schema)
    yield database
    for engine in database._engines:
        engine.dispose()
    # A test may have left the server dead, frozen or read-only; the next one gets it whole.
    server.sigcont()
    server.start()
    if server.refuses_writes:
        server.read_only(False)
    server.drop_database(schema)


@pytest.fixture
def database(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Iterator[Database]:
    """A fresh database; the test runs once for each of mariadb, mysql56, postgresql, sqlite."""
    with _fresh_database(servers, request.param, tmp_path) as database:
        yield database


@pytest.fixture
def mariadb(servers: Servers, tmp_path: Path) -> Iterator[Database]:
    """A fresh database on MariaDB."""
    with _fresh_database(servers, "mariadb", tmp_path) as database:
        yield database


@pytest.fixture
def mysql56(servers: Servers, tmp_path: Path) -> Iterator[Database]:
    """A fresh database on MySQL 5.6."""
    with _fresh_database(servers, "mysql56", tmp_path) as database:
        yield database


@pytest.fixture
def postgresql(servers: Servers, tmp_path: Path) -> Iterator[Database]:
    """A fresh database on PostgreSQL."""
    with _fresh_database(servers, "postgresql", tmp_path) as database:
        yield database


@pytest.fixture
def sqlite(servers: Servers, tmp_path: Path) -> Iterator[Database]:
    """A fresh SQLite file."""
    with _fresh_database(servers, "sqlite", tmp_path) as database:
        yield database


def _empty(server: Any) -> Any:
    server.sigcont()
    server.start()
    with contextlib.closing(server.client()) as client:
        client.flushall()
    return server


@pytest.fixture
def redis_server(servers: Servers) -> Any:
    """Redis, emptied: .url, .client(), .kill9(), .restart()."""
    return _empty(_get(servers, "redis"))


@pytest.fixture
def valkey_server(servers: Servers) -> Any:
    """Valkey, emptied; the same as redis_server."""
    return _empty(_get(servers, "valkey"))


@pytest.fixture
def redis62_server(servers: Servers) -> Any:
    """The oldest Redis that we promise, emptied; the same as redis_server."""
    return _empty(_get(servers, "redis62"))


@pytest.fixture
def proxied() -> Iterator[Callable[[Database], Proxy]]:
    """proxied(database) -> a Proxy in front of its server; proxy.url leads through it."""
    with contextlib.ExitStack() as open_proxies:

        def open_proxy(database: Database) -> Proxy:
            database.need("network")
            protocol = "postgresql" if database.url.startswith("postgresql") else "mysql"
            proxy = Proxy("127.0.0.1", database.server.port, protocol=protocol)
            open_proxies.enter_context(proxy)
            proxy.url = database.server.url(database.schema, port=proxy.port)
            return proxy

        yield open_proxy


# ---- processes and waiting ------------------------------------------------------------------------------------


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """eventually(predicate, timeout=10): waits for what must come true, and returns it."""
    return processes.eventually


@pytest.fixture
def celery_processes(tmp_path: Path) -> Iterator[processes.CeleryProcesses]:
    """Starts real Celery processes (.worker, .beat, .start) and ends them with the test."""
    started = processes.CeleryProcesses(tmp_path)
    yield started
    started.close()


@pytest.fixture
def celery_worker(celery_processes: processes.CeleryProcesses) -> Callable[..., processes.CeleryProcess]:
    """celery_worker(app_module, *args, env=...): a real worker that has said it is ready."""
    return celery_processes.worker


@pytest.fixture
def celery_beat(celery_processes: processes.CeleryProcesses) -> Callable[..., processes.CeleryProcess]:
    """celery_beat(app_module, *args, env=...): a real beat that has started."""
    return celery_processes.beat
