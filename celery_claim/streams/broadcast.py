"""Read broadcasts: every process gets every message, also those sent while its connection was away."""

from __future__ import annotations

import re
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from celery_claim.streams.options import StreamOptions
from celery_claim.streams.wire.keys import Keys

#: Milliseconds that one read waits; a new binding ends it early.
BLOCK_MS = 5000

#: Position per (process-wide) stream and queue; it outlives a connection, so a reconnect leaves no gap.
_positions: dict[tuple[str, str], str] = {}


def pattern_of(routing_key: str) -> re.Pattern[str] | None:
    """What a binding with wildcards lets through; None lets everything through, as a fanout exchange does."""
    if "#" not in routing_key and "*" not in routing_key:
        return None
    words = (".*" if word == "#" else r"[^.]+" if word == "*" else re.escape(word) for word in routing_key.split("."))
    return re.compile(r"\.".join(words).replace(r"\..*", r"(\..*)?"))


def remember(client: Any, stream: str, queue: str) -> None:
    """From here on, a queue that is bound to an exchange misses nothing, whenever it is read."""
    if (stream, queue) not in _positions:
        last = client.execute_command("XREVRANGE", stream, "+", "-", "COUNT", 1)
        _positions[stream, queue] = last[0][0].decode() if last else f"{_server_ms(client) - 1}-0"


def get(client: Any, stream: str, queue: str) -> tuple[str, dict[bytes, bytes]] | None:
    """The next broadcast of a queue that nobody consumes, without waiting for one."""
    remember(client, stream, queue)
    found = client.execute_command("XRANGE", stream, f"({_positions[stream, queue]}", "+", "COUNT", 1)
    if not found:
        return None
    ((id_, fields),) = found
    _positions[stream, queue] = id_.decode()
    return id_.decode(), fields


def _server_ms(client: Any) -> int:
    # The server's clock also makes the ids.
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


class BroadcastReader(threading.Thread):
    """Reads the fanout exchanges of one channel into a buffer and calls `on_ready`."""

    def __init__(
        self, client: Any, commands: Any, keys: Keys, options: StreamOptions, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(name="celery_claim-broadcasts", daemon=True)
        self.client, self.commands, self.keys, self.options = client, commands, keys, options
        self.buffer: deque[tuple[str, str, dict[bytes, bytes]]] = deque()
        self.error: Exception | None = None
        # Weakly, so that the thread ends with a transport that was dropped without being closed.
        self._tell = weakref.WeakMethod(on_ready)
        self._bound: dict[str, tuple[str, re.Pattern[str] | None]] = {}
        self._changed = threading.Event()
        self._stopping = False
        self._client_id: int | None = None

    def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Read an exchange for a queue, from where it was bound or read last, but nothing older than fanout_max_age."""
        stream = self.keys.fanout(exchange)
        remember(self.commands, stream, queue)
        oldest = f"{_server_ms(self.commands) - int(self.options.fanout_max_age * 1000)}-0"
        _positions[stream, queue] = max(_positions[stream, queue], oldest, key=_order)
        self._bound[queue] = (stream, pattern_of(routing_key))
        self._unblock()

    def unbind(self, queue: str) -> None:
        stream, _ = self._bound.pop(queue, ("", None))
        _positions.pop((stream, queue), None)

    def stop(self) -> None:
        self._stopping = True
        self._unblock()
        if self is not threading.current_thread() and self.is_alive():
            self.join(BLOCK_MS / 1000 + 1)

    def abandon(self) -> None:
        """The connection is lost: end without talking to the server."""
        self._stopping = True
        self._changed.set()
        self.client.connection_pool.disconnect()

    def _unblock(self) -> None:
        self._changed.set()
        if self._client_id is not None and self.is_alive():
            try:
                self.commands.execute_command("CLIENT", "UNBLOCK", self._client_id)
            except Exception:
                # Not allowed to this user, or no server: the read ends by itself.
                return

    def run(self) -> None:
        try:
            self._client_id = self.client.execute_command("CLIENT", "ID")
            while not self._stopping and self._tell() is not None:
                self._read_once()
        except Exception as error:
            if not self._stopping:
                self.error = error
                self._on_ready()
        finally:
            self.client.close()

    def _on_ready(self) -> None:
        tell = self._tell()
        if tell is not None:
            tell()

    def _read_once(self) -> None:
        bound = dict(self._bound)
        self._changed.clear()
        if not bound:
            self._changed.wait(BLOCK_MS / 1000)
            return
        names = [stream for stream, _ in bound.values()]
        starts = [_positions.get((stream, queue), "$") for queue, (stream, _) in bound.items()]
        command = ["XREAD", "COUNT", 100, "BLOCK", BLOCK_MS, "STREAMS", *names, *starts]
        reply = self.client.execute_command(*command) or []
        for name, entries in reply:
            for queue, (stream, pattern) in bound.items():
                if stream != name.decode():
                    continue
                position = _positions.get((stream, queue), "0-0")
                for id_, fields in entries:
                    key = _order(id_.decode())
                    if key > _order(position) and queue in self._bound:
                        _positions[stream, queue] = id_.decode()
                        if pattern is None or pattern.fullmatch(fields.get(b"rk", b"").decode()):
                            self.buffer.append((queue, id_.decode(), fields))
        if reply:
            self._on_ready()


def _order(id_: str) -> tuple[int, int]:
    milliseconds, _, sequence = id_.partition("-")
    return int(milliseconds), int(sequence or 0)
