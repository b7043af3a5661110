"""Which exchange leads to which queue: kept on the server, so that a process that only publishes knows it too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from celery_claim.streams import scripts
from celery_claim.streams.options import StreamOptions
from celery_claim.streams.wire.keys import Keys

logger = logging.getLogger("celery_claim.streams")

#: Between the parts of a binding; no routing key or queue name has it.
SEPARATOR = "\x06\x16"
FOREVER = float("inf")


class Binding(NamedTuple):
    """One way from an exchange to a queue."""

    routing_key: str
    queue: str
    #: Whether the queue goes away by itself, so that a message must not bring it back.
    expires: bool


class Routes:
    """Exchanges, bindings and queues of one connection, and what the server knows of everybody's."""

    def __init__(self, client: Any, keys: Keys, options: StreamOptions) -> None:
        self.client, self.keys, self.options = client, keys, options
        #: Types of the exchanges that are not direct, as far as this connection has asked.
        self._kinds: dict[str, str] = {}
        #: Broadcast queues of this process -> exchange and routing key.
        self.broadcasts: dict[str, tuple[str, str]] = {}
        #: Queues that expire when nobody uses them -> milliseconds.
        self.expiring: dict[str, int] = {}
        #: What this connection declared, to be written again when the server lost it.
        self._bound: dict[tuple[str, str, str], None] = {}
        self._limits: dict[str, dict[str, int]] = {}

    # ---- exchanges ------------------------------------------------------------------------------------------

    def declare_exchange(self, exchange: str, kind: str) -> None:
        """Note the type of an exchange that is not direct, also for programs that do not declare it."""
        self._store("HSET", self.keys.exchanges, exchange, kind)
        self._kinds[exchange] = kind

    def kind_of(self, exchange: str) -> str | None:
        """The type that somebody declared an exchange with; None when nobody did, or it is direct."""
        if exchange not in self._kinds:
            known = self.client.hget(self.keys.exchanges, exchange)
            if known is None:
                return None
            self._kinds[exchange] = known.decode()
        return self._kinds[exchange]

    # ---- bindings -------------------------------------------------------------------------------------------

    def bind(self, exchange: str, routing_key: str, queue: str) -> None:
        self._bound[exchange, routing_key, queue] = None
        self._store("ZADD", self.keys.bindings(exchange), self._stale_at(queue), _member(routing_key, queue))

    def unbind(self, exchange: str, routing_key: str, queue: str) -> None:
        self._bound.pop((exchange, routing_key, queue), None)
        self.client.zrem(self.keys.bindings(exchange), _member(routing_key, queue))

    def bindings(self, exchange: str) -> list[Binding]:
        """The living ones; those of queues that expired long ago are removed on the way."""
        pairs = self.client.zrange(self.keys.bindings(exchange), 0, -1, withscores=True)
        now = self.server_ms() if any(score != FOREVER for _, score in pairs) else 0
        stale = [member for member, score in pairs if score < now]
        if stale:
            self.client.zrem(self.keys.bindings(exchange), *stale)
        living = []
        for member, score in pairs:
            if score >= now:
                routing_key, _, queue = member.decode().split(SEPARATOR)
                living.append(Binding(routing_key, queue, score != FOREVER))
        return living

    # ---- queues ---------------------------------------------------------------------------------------------

    def declare_queue(self, queue: str, arguments: Mapping[str, Any]) -> None:
        """Note a queue's limits (`x-expires` in ms, `x-max-length`) and that it exists."""
        limits: dict[str, int] = {}
        if arguments.get("x-expires"):
            limits["expires"] = self.expiring[queue] = int(arguments["x-expires"])
        length = arguments.get("x-max-length") or self.options.max_length
        if length is not None:
            limits["max_length"] = int(length)
        self._limits[queue] = limits
        self._store_queue(queue)

    def has_limits(self, queue: str) -> bool:
        """Whether this connection declared the queue with a length or an end."""
        return bool(self._limits.get(queue))

    def forget_queue(self, queue: str) -> None:
        self.client.delete(*self.keys.of_queue(queue))
        self.client.srem(self.keys.queues, queue)
        for known in (self._limits, self.expiring):
            known.pop(queue, None)
        for bound in [bound for bound in self._bound if bound[2] == queue]:
            self.unbind(*bound)

    def write_again(self, queues: Iterable[str]) -> None:
        """The server lost its keys: write what this connection declared for these queues."""
        wanted = set(queues)
        for exchange, kind in list(self._kinds.items()):
            self._store("HSET", self.keys.exchanges, exchange, kind)
        for exchange, routing_key, queue in list(self._bound):
            if queue in wanted:
                self.bind(exchange, routing_key, queue)
        for queue in wanted & self._limits.keys():
            self._store_queue(queue)

    def bind_again(self, exchange: str) -> None:
        """Write this connection's bindings of one exchange once more."""
        for name, routing_key, queue in list(self._bound):
            if name == exchange:
                self.bind(exchange, routing_key, queue)

    def keep_alive(self, queues: Iterable[str]) -> float:
        """Put off the end of expiring queues that are read; seconds until the next time."""
        expiring = {queue: self.expiring[queue] for queue in queues if queue in self.expiring}
        if not expiring:
            return FOREVER
        now = self.server_ms()
        with self.client.pipeline(transaction=False) as pipe:
            for queue, expires in expiring.items():
                for key in self.keys.of_queue(queue):
                    pipe.pexpire(key, expires)
            for exchange, routing_key, queue in list(self._bound):
                if queue in expiring:
                    pipe.zadd(
                        self.keys.bindings(exchange), {_member(routing_key, queue): now + expiring[queue]}, xx=True
                    )
            pipe.execute(raise_on_error=False)
        return min(expiring.values()) / 3000

    # ---- how it is stored -----------------------------------------------------------------------------------

    def _store_queue(self, queue: str) -> None:
        limits = self._limits[queue]
        words = [word for pair in limits.items() for word in pair]
        if "expires" in limits:
            meta, described = self.keys.meta(queue), [limits["expires"], *words]
            self._unless_full(meta, lambda: scripts.run(self.client, "describe", [meta], described))
            return
        if limits:
            self._store("HSET", self.keys.meta(queue), *words)
        self._store("SADD", self.keys.queues, queue)

    def _store(self, *command: Any) -> None:
        self._unless_full(command[1], lambda: self.client.execute_command(*command))

    def _unless_full(self, key: str, store: Callable[[], object]) -> None:
        """Write what is mostly there already; a server without memory must not keep workers from draining it."""
        try:
            store()
        except ResponseError as error:
            if "OOM" not in str(error):
                raise
            logger.warning("%s was not stored: %s", key, error)

    def _stale_at(self, queue: str) -> str | int:
        expires = self.expiring.get(queue)
        return "+inf" if expires is None else self.server_ms() + expires

    def server_ms(self) -> int:
        """The server's clock, in milliseconds since 1970."""
        seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000


def _member(routing_key: str, queue: str) -> str:
    return SEPARATOR.join((routing_key or "", "", queue))
