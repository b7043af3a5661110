"""A TCP proxy that fails the way networks do: it cuts, freezes, delays, and loses single requests or replies.

    with Proxy("127.0.0.1", server.port, protocol="mysql") as proxy:
        proxy.swallow_reply(rb"^UPDATE")     # the server does it, the client never hears of it
        proxy.port                           # connect here

It reads just enough of the MySQL and PostgreSQL protocols to know the SQL of a request and the end of its reply.
Connections must not be encrypted (the servers in tests/servers.py offer no TLS).
"""

from __future__ import annotations

import collections
import contextlib
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

#: https://dev.mysql.com/doc/dev/mysql-server/latest/my__command_8h.html
COM_QUERY = 0x03
#: https://www.postgresql.org/docs/current/protocol-message-formats.html: SSLRequest, GSSENCRequest
PG_ENCRYPTION_REQUESTS = (80877103, 80877104)


@dataclass
class _Rule:
    """Which requests are lost, how often, and on which side of the server."""

    pattern: re.Pattern[bytes]
    times: int | None
    share: float
    chance: random.Random
    reaches_server: bool

    def takes(self, sql: bytes) -> bool:
        if self.times == 0 or not self.pattern.search(sql) or self.chance.random() >= self.share:
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass(eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    #: Set once the reply to a request is to be kept from the client.
    swallowing: threading.Event = field(default_factory=threading.Event)

    def cut(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """Listens on a port of its own and forwards to one server; use it as a context manager."""

    def __init__(self, host: str, port: int, *, protocol: str | None = None) -> None:
        """`protocol` is mysql, postgresql, or None for one whose requests need not be understood."""
        self._target = (host, port)
        self._requests, self._reply = PROTOCOLS[protocol]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        #: Whatever leads clients through this proxy; the fixture `proxied` sets it.
        self.url = ""
        #: The last requests seen, as SQL.
        self.statements: collections.deque[bytes] = collections.deque(maxlen=10000)
        #: The requests whose reply was swallowed, and those that never reached the server.
        self.swallowed: list[bytes] = []
        self.lost: list[bytes] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._delay = 0.0
        self._down = False
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._open: set[_Connection] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what a test does to the network

    def cut(self) -> None:
        """Cut every open connection; new ones are taken."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            connection.cut()

    def pause(self) -> None:
        """Forward nothing in either direction and keep every connection open (a partition)."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forward again, beginning with what has waited."""
        self._flowing.set()

    def delay(self, seconds: float) -> None:
        """Hold back every piece of a request for that long; 0 ends it."""
        self._delay = seconds

    def down(self) -> None:
        """Cut everything and refuse new connections until up()."""
        self._down = True
        self.cut()

    def up(self) -> None:
        self._down = False

    def swallow_reply(self, match: bytes, *, times: int | None = 1, share: float = 1.0, seed: int = 0) -> None:
        """Let the server carry out requests whose SQL matches, then cut the client before it hears the answer.

        `times=None` means every one; `share=0.2` takes one in five at random, by `seed`.
        """
        self._add_rule(match, times, share, seed, reaches_server=True)

    def lose_request(self, match: bytes, *, times: int | None = 1, share: float = 1.0, seed: int = 0) -> None:
        """Cut the client when it sends a request whose SQL matches; the server never sees that request."""
        self._add_rule(match, times, share, seed, reaches_server=False)

    def heal(self) -> None:
        """Forget every rule, delay and pause."""
        with self._lock:
            self._rules.clear()
        self._delay = 0.0
        self._down = False
        self._flowing.set()

    def close(self) -> None:
        self._listener.close()
        self.heal()
        self.cut()

    def _add_rule(self, match: bytes, times: int | None, share: float, seed: int, *, reaches_server: bool) -> None:
        rule = _Rule(re.compile(match, re.IGNORECASE | re.DOTALL), times, share, random.Random(seed), reaches_server)
        with self._lock:
            self._rules.append(rule)

    # ---- forwarding: two threads per connection

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._down:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(client, server)
            with self._lock:
                self._open.add(connection)
            for pump in (self._pump_requests, self._pump_replies):
                threading.Thread(target=self._guard, args=(pump, connection), daemon=True).start()

    def _guard(self, pump: Callable[[_Connection], None], connection: _Connection) -> None:
        try:
            with contextlib.suppress(OSError):
                pump(connection)
        finally:
            connection.cut()
            with self._lock:
                self._open.discard(connection)

    def _pump_requests(self, connection: _Connection) -> None:
        requests = self._requests()
        while data := connection.client.recv(65536):
            if self._delay:
                time.sleep(self._delay)
            self._flowing.wait()
            for sql in requests.read(data):
                self.statements.append(sql)
                rule = self._rule_for(sql)
                if rule is None:
                    continue
                if not rule.reaches_server:
                    self.lost.append(sql)
                    return
                self.swallowed.append(sql)
                # The client waited for the last reply in full before it sent this: the next byte from
                # the server begins the reply that is to be lost.
                connection.swallowing.set()
            connection.server.sendall(data)

    def _pump_replies(self, connection: _Connection) -> None:
        reply = self._reply()
        while data := connection.server.recv(65536):
            if connection.swallowing.is_set():
                if reply.complete(data):
                    return
                continue
            self._flowing.wait()
            connection.client.sendall(data)

    def _rule_for(self, sql: bytes) -> _Rule | None:
        with self._lock:
            return next((rule for rule in self._rules if rule.takes(sql)), None)


# ---- what clients send ----------------------------------------------------------------------------------------


class _Requests:
    """Finds the SQL in what a client sends; this one understands nothing."""

    def read(self, data: bytes) -> Iterator[bytes]:
        return iter(())


class _MySQLRequests(_Requests):
    def __init__(self) -> None:
        self._buffer = b""

    def read(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:3], "little")
            if len(self._buffer) < 4 + size:
                return
            sequence, payload = self._buffer[3], self._buffer[4 : 4 + size]
            self._buffer = self._buffer[4 + size :]
            # A command begins a new sequence; the packets of the handshake have higher numbers.
            if sequence == 0 and payload[:1] == bytes([COM_QUERY]):
                yield payload[1:]


class _PostgresRequests(_Requests):
    """Simple queries, and extended ones followed from Parse over Bind to Execute."""

    def __init__(self) -> None:
        self._buffer = b""
        self._started = False
        self._prepared: dict[bytes, bytes] = {}
        self._portals: dict[bytes, bytes] = {}

    def read(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while True:
            prefix = 1 if self._started else 0  # the start-up messages have no type byte
            if len(self._buffer) < prefix + 4:
                return
            (size,) = struct.unpack_from("!I", self._buffer, prefix)
            if len(self._buffer) < prefix + size:
                return
            kind, body = self._buffer[:prefix], self._buffer[prefix + 4 : prefix + size]
            self._buffer = self._buffer[prefix + size :]
            if not self._started:
                (code,) = struct.unpack_from("!I", body)
                self._started = code not in PG_ENCRYPTION_REQUESTS
            elif kind == b"Q":
                yield body.rstrip(b"\0")
            elif kind == b"P":
                name, sql, _ = body.split(b"\0", 2)
                self._prepared[name] = sql
            elif kind == b"B":
                portal, name, _ = body.split(b"\0", 2)
                self._portals[portal] = self._prepared.get(name, b"")
            elif kind == b"E":
                yield self._portals.get(body.split(b"\0", 1)[0], b"")


# ---- what servers answer --------------------------------------------------------------------------------------


class _Reply:
    """Finds the end of one reply; this one takes the first piece for all of it."""

    def complete(self, data: bytes) -> bool:
        return True


class _MySQLReply(_Reply):
    """One OK or ERR packet, or a result set: columns, EOF, rows, EOF."""

    def __init__(self) -> None:
        self._buffer = b""
        self._packets = 0
        self._ends = 0

    def complete(self, data: bytes) -> bool:
        self._buffer += data
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:3], "little")
            if len(self._buffer) < 4 + size:
                return False
            payload = self._buffer[4 : 4 + size]
            self._buffer = self._buffer[4 + size :]
            self._packets += 1
            if payload[:1] == b"\xff" or (self._packets == 1 and payload[:1] == b"\x00"):
                return True
            if payload[:1] == b"\xfe" and size < 9:
                self._ends += 1
                # Without the EOF after the columns (CLIENT_DEPRECATE_EOF) this waits for one more, and
                # the client then sees its connection hang instead of break; no driver here asks for that.
                if self._ends == 2:
                    return True
        return False


class _PostgresReply(_Reply):
    """Everything up to ReadyForQuery."""

    def __init__(self) -> None:
        self._buffer = b""

    def complete(self, data: bytes) -> bool:
        self._buffer += data
        while len(self._buffer) >= 5:
            (size,) = struct.unpack_from("!I", self._buffer, 1)
            if len(self._buffer) < 1 + size:
                return False
            if self._buffer[:1] == b"Z":
                return True
            self._buffer = self._buffer[1 + size :]
        return False


PROTOCOLS: dict[str | None, tuple[type[_Requests], type[_Reply]]] = {
    None: (_Requests, _Reply),
    "mysql": (_MySQLRequests, _MySQLReply),
    "postgresql": (_PostgresRequests, _PostgresReply),
}
