"""A kombu channel over streams: publish, consume within the prefetch, acknowledge, bind."""

from __future__ import annotations

import logging
import os
from datetime import datetime, timezone
from queue import Empty
from typing import Any

from kombu.exceptions import InconsistencyError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments  # type: ignore[attr-defined]
from redis.exceptions import ResponseError

from celery_claim.streams import append, scripts
from celery_claim.streams.broadcast import BroadcastReader
from celery_claim.streams.consumer_group import ensure_groups
from celery_claim.streams.lease import Entry, Leases
from celery_claim.streams.read import Reader
from celery_claim.streams.wire import codec

logger = logging.getLogger("celery_claim.streams")

#: Between the parts of a binding; no routing key or queue name has it.
SEPARATOR = "\x06\x16"


class QoS(virtual.QoS):
    """Counts what the leases hold: they outlive the channel, and so does the right to acknowledge."""

    channel: Any
    restore_at_shutdown = False

    def __init__(self, channel: Channel, prefetch_count: int = 0) -> None:
        # The parent would register a finalizer that puts messages back when the process ends.
        self.channel = channel
        self.prefetch_count = prefetch_count or 0

    def append(self, message: Any, delivery_tag: str) -> None:
        self.channel.leases.deliver(delivery_tag, message)

    def can_consume(self) -> bool:
        return not self.prefetch_count or self.can_consume_max_estimate() > 0

    def can_consume_max_estimate(self) -> int:
        if not self.prefetch_count:
            return int(self.channel.options.fetch_batch)
        # Messages of a lost connection that are still worked on take their place in the prefetch.
        inherited = sum(len(leases) for leases in list(Leases.orphans))
        return max(0, self.prefetch_count - len(self.channel.leases) - inherited)

    def ack(self, delivery_tag: str) -> None:
        self.channel.leases.ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if requeue:
            self.channel.leases.release([delivery_tag], counted=True)
        else:
            self.channel.leases.bury(delivery_tag, "rejected")

    def restore_unacked(self) -> None:
        """Give back what this channel holds."""
        self.channel.leases.release(list(self.channel.leases._held))

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Nothing: closing the channel gives messages back."""


class Channel(virtual.Channel):
    """A channel with a reader thread of its own once it consumes."""

    #: Our transport, until the channel is closed.
    connection: Any

    QoS = QoS
    supports_fanout = True
    do_restore = False
    body_encoding = None  # type: ignore[assignment]
    from_transport_options = ()

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.options, self.keys, self.client = connection.options, connection.keys, connection.commands
        self.leases = Leases(self.client, self.keys, self.options, self._on_room)
        self.reader: Reader | None = None
        self.broadcasts: BroadcastReader | None = None
        self._pid = os.getpid()
        self._no_ack: set[str] = set()
        self._fanout: dict[str, tuple[str, str]] = {}
        self._expires: dict[str, int] = {}
        self._delivering = False

    # ---- publish --------------------------------------------------------------------------------------------

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        step = self.keys.step_of(self._get_message_priority(message))
        wait = self._seconds_until_due(message)
        if wait >= self.options.delayed_min and self.options.delayed_delivery:
            headers = dict(message["headers"])
            # Moved away, so that no worker's clock delays the message a second time.
            headers["x-eta"] = headers.pop("eta")
            append.delay(self.client, self.keys, queue, step, {**message, "headers": headers}, seconds=wait)
            return
        append.append(self.client, self.keys, queue, step, message, expires=kwargs.get("must_exist", False))

    @staticmethod
    def _seconds_until_due(message: dict[str, Any]) -> float:
        """Seconds from the publisher's now: the difference is right even when its clock is wrong."""
        eta = (message.get("headers") or {}).get("eta")
        if not eta:
            return 0
        try:
            due = eta if isinstance(eta, datetime) else datetime.fromisoformat(str(eta).replace("Z", "+00:00"))
        except ValueError:
            return 0
        due = due if due.tzinfo else due.replace(tzinfo=timezone.utc)
        return (due - datetime.now(timezone.utc)).total_seconds()

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any) -> None:
        fields = {**codec.encode(message), "rk": routing_key or ""}
        words = [word for pair in fields.items() for word in pair]
        stream = self.keys.fanout(exchange)
        try:
            self.client.execute_command("XADD", stream, "MAXLEN", "~", self.options.fanout_maxlen, "*", *words)
        except ResponseError as error:
            if "OOM" not in str(error):
                raise
            # Events and remote control must not end a worker that could still empty a full server.
            logger.warning("a broadcast to %s was not sent: %s", exchange, error)

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> Any:
        self._inplace_augment_message(message, exchange, routing_key)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("mandatory", "immediate")}
        if not exchange:
            return self._put(routing_key, message)
        kind = self.typeof(exchange)
        if kind.type == "fanout":
            return self._put_fanout(exchange, message, routing_key)
        queues = self._routes(exchange, routing_key)
        if not queues:
            # The server may have lost its keys: bind again what this connection declared.
            self._bind_again(exchange)
            queues = self._routes(exchange, routing_key)
        if not queues:
            raise InconsistencyError(f"exchange {exchange!r} has no queue for the routing key {routing_key!r}")
        for queue, expires in queues.items():
            self._put(queue, dict(message), must_exist=expires)
        return None

    def _inplace_augment_message(self, message: dict[str, Any], exchange: Any, routing_key: Any) -> None:
        properties = message["properties"]
        properties["delivery_tag"] = self._next_delivery_tag()
        properties.setdefault("delivery_info", {}).update(exchange=exchange, routing_key=routing_key)

    # ---- exchanges, bindings, queues ------------------------------------------------------------------------

    def exchange_declare(  # type: ignore[override]
        self, exchange: str | None = None, type: str = "direct", **kwargs: Any
    ) -> None:
        super().exchange_declare(exchange=exchange, type=type, **kwargs)
        if exchange and type and type != "direct" and not kwargs.get("passive"):
            # A producer that does not declare the exchange must still know how to route.
            self._accepting_a_full_server("HSET", self.keys.exchanges, exchange, type)
            self.connection.exchange_kinds[exchange] = type

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        declared = self.connection.state.exchanges.get(exchange, {}).get("type", default)
        if declared == "direct" and exchange:
            kinds = self.connection.exchange_kinds
            if exchange not in kinds:
                known = self.client.hget(self.keys.exchanges, exchange)
                if known is None:
                    return self.exchange_types[declared]
                kinds[exchange] = known.decode()
            declared = kinds[exchange]
        return self.exchange_types[declared]

    def _queue_bind(self, exchange: str, routing_key: str, pattern: Any, queue: str) -> None:
        if self.typeof(exchange).type == "fanout":
            self._fanout[queue] = (exchange, routing_key or "")
            self.connection.fanout_queues[queue] = self._fanout[queue]
            return
        expires = self.connection.expiring.get(queue)
        score = "+inf" if expires is None else self.connection.server_ms() + expires
        member = SEPARATOR.join((routing_key or "", "", queue))
        self._accepting_a_full_server("ZADD", self.keys.bindings(exchange), score, member)

    def _bind_again(self, exchange: str) -> None:
        for bound in list(self.connection.state.bindings):
            if bound.exchange == exchange:
                self._queue_bind(exchange, bound.routing_key, None, bound.queue)

    def get_table(self, exchange: str) -> list[tuple[str, Any, str]]:
        kind = self.typeof(exchange)
        found = []
        for member, _ in self._bindings(exchange):
            routing_key, _, queue = member
            found.append(kind.prepare_bind(queue, exchange, routing_key, None))
        return found

    def _bindings(self, exchange: str) -> list[tuple[list[str], float]]:
        pairs = self.client.zrange(self.keys.bindings(exchange), 0, -1, withscores=True)
        found = [(member.decode().split(SEPARATOR), score) for member, score in pairs]
        if any(score != float("inf") for _, score in found):
            now = self.connection.server_ms()
            stale = [member for member, score in found if score < now]
            found = [(member, score) for member, score in found if score >= now]
            for member in stale:
                self.client.zrem(self.keys.bindings(exchange), SEPARATOR.join(member))
        return found

    def _routes(self, exchange: str, routing_key: str) -> dict[str, bool]:
        """The queues for a routing key, and whether each must still exist when it is published to."""
        kind = self.typeof(exchange)
        bindings = self._bindings(exchange)
        table = [kind.prepare_bind(queue, exchange, key, None) for (key, _, queue), _ in bindings]
        expiring = {member[2] for member, score in bindings if score != float("inf")}
        return {queue: queue in expiring for queue in kind.lookup(table, exchange, routing_key, None)}

    def _new_queue(self, queue: str, auto_delete: bool = False, **kwargs: Any) -> None:
        if queue in self.connection.fanout_queues:
            return
        arguments = kwargs.get("arguments") or {}
        facts: dict[str, Any] = {}
        if arguments.get("x-expires"):
            facts["expires"] = int(arguments["x-expires"])
            self.connection.expiring[queue] = facts["expires"]
        length = arguments.get("x-max-length") or self.options.max_length
        if length is not None:
            facts["max_length"] = int(length)
        if facts:
            words = [word for pair in facts.items() for word in pair]
            self._accepting_a_full_server("HSET", self.keys.meta(queue), *words)
        if "expires" in facts:
            self.client.pexpire(self.keys.meta(queue), facts["expires"])
        else:
            self._accepting_a_full_server("SADD", self.keys.queues, queue)

    def prepare_queue_arguments(self, arguments: dict[str, Any] | None, **kwargs: Any) -> dict[str, Any]:

        return dict(to_rabbitmq_queue_arguments(arguments or {}, **kwargs))

    def _accepting_a_full_server(self, *command: Any) -> None:
        """Write what is mostly there already; a server without memory must not keep workers from draining it."""
        try:
            self.client.execute_command(*command)
        except ResponseError as error:
            if "OOM" not in str(error):
                raise
            logger.warning("%s was not stored: %s", command[1], error)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return bool(self.client.sismember(self.keys.queues, queue) or self.client.exists(*self.keys.of_queue(queue)))

    def _size(self, queue: str) -> int:
        """Messages that wait for a worker: not the delayed ones, nor those that a worker holds."""
        total = 0
        for stream in self.keys.streams(queue):
            length = self.client.xlen(stream)
            if length:
                total += length - self._pending(stream)
        return total

    def _pending(self, stream: str) -> int:
        try:
            reply = self.client.execute_command("XPENDING", stream, self.options.group)
        except ResponseError as error:
            if "NOGROUP" in str(error):
                return 0
            raise
        consumers = reply["consumers"] if isinstance(reply, dict) else []
        return sum(each["pending"] for each in consumers if each["name"] not in (b"@free", "@free"))

    def _purge(self, queue: str) -> int:
        return int(
            self.client.register_script(scripts.text("purge"))(
                keys=[self.keys.due(queue), self.keys.delayed(queue), *self.keys.streams(queue)],
                args=[self.options.group],
            )
        )

    def _delete(self, queue: str, exchange: str = "", routing_key: str = "", *args: Any, **kwargs: Any) -> None:
        if exchange:
            member = SEPARATOR.join((routing_key or "", "", queue))
            self.client.zrem(self.keys.bindings(exchange), member)
        self.client.delete(*self.keys.of_queue(queue))
        self.client.srem(self.keys.queues, queue)

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        if if_empty and self._size(queue):
            return
        super().queue_delete(queue, if_unused, False, **kwargs)
        if queue not in self.connection.fanout_queues:
            self._delete(queue)

    # ---- consume --------------------------------------------------------------------------------------------

    def basic_consume(  # type: ignore[override]
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        if no_ack:
            self._no_ack.add(queue)
        if queue in self.connection.fanout_queues:
            exchange, routing_key = self.connection.fanout_queues[queue]
            if self.broadcasts is None:
                client = self.connection.open(single=True)
                self.broadcasts = BroadcastReader(client, self.client, self.keys, self.connection.wake)
                self.broadcasts.bind(queue, exchange, routing_key)
                self.broadcasts.start()
            else:
                self.broadcasts.bind(queue, exchange, routing_key)
            return
        if self.reader is None:
            self.reader = self._new_reader(self.connection.open(single=True))
            self._read_queues()
            self.reader.start()
        else:
            self._read_queues()

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is None:
            return
        self._no_ack.discard(queue)
        if self.broadcasts is not None and queue in self._fanout:
            self.broadcasts.unbind(queue)
        elif self.reader is not None and not self.closed:
            self._read_queues()

    def _new_reader(self, client: Any) -> Reader:
        return Reader(client, self.keys, self.options, self.leases, room=self._room, on_ready=self.connection.wake)

    def _read_queues(self) -> None:
        assert self.reader is not None
        work = dict.fromkeys(queue for queue in self._active_queues if queue not in self.connection.fanout_queues)
        self.reader.consume(tuple(work))

    def _room(self) -> int:
        assert self.reader is not None
        waiting = len(self.reader.buffer)
        if "can_consume" in vars(self.qos):
            # `celery worker --disable-prefetch` replaces it: one message, and only when a process is free.
            return int(not waiting and not self._delivering and bool(self.qos.can_consume()))
        if not self.qos.prefetch_count:
            return max(0, int(self.options.fetch_batch) - waiting)
        return int(self.qos.can_consume_max_estimate())

    def _on_room(self) -> None:
        if self.reader is not None:
            self.reader.poke()

    def deliver_one(self) -> bool:
        """Hand the next message to its consumer; False when there is none. A reader's error is raised here."""
        for reader in (self.broadcasts, self.reader):
            if reader is not None and reader.error is not None:
                raise reader.error
        if self.broadcasts is not None and self.broadcasts.buffer:
            queue, id_, fields = self.broadcasts.buffer.popleft()
            if queue in self.connection._callbacks:
                try:
                    message = codec.decode(fields)
                except codec.Undecodable as error:
                    logger.error("a broadcast to %s cannot be read: %s", queue, error)
                else:
                    message["properties"]["delivery_tag"] = f"{id_}/{queue}"
                    self.connection._callbacks[queue](message)
            return True
        if self.reader is None or not self.reader.buffer:
            return False
        self._delivering = True
        try:
            self._deliver_entry(*self.reader.buffer.popleft())
        finally:
            self._delivering = False
        return True

    def _deliver_entry(self, entry: Entry, fields: dict[bytes, bytes]) -> None:
        callback = self.connection._callbacks.get(entry.queue)
        if callback is None:
            self.leases.release([entry.tag])
            return
        try:
            message = self._message_of(entry, fields)
        except codec.Undecodable as error:
            logger.error("message %s of queue %s is a dead letter: %s", entry.id, entry.queue, error)
            self.leases.bury(entry.tag, f"undecodable: {error}")
            return
        if entry.queue in self._no_ack:
            self.leases.ack(entry.tag)
        callback(message)

    @staticmethod
    def _message_of(entry: Entry, fields: dict[bytes, bytes]) -> dict[str, Any]:
        message = codec.decode(fields)
        properties = message["properties"]
        properties["delivery_tag"] = entry.tag
        where = properties["delivery_info"]
        where.setdefault("exchange", "")
        where.setdefault("routing_key", entry.queue)
        if entry.deliveries > 1:
            where["redelivered"] = True
            message["headers"]["x-delivery-count"] = entry.deliveries
        return message

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        getter = self._new_reader(self.client)
        ensure_groups(self.client, self.keys, self.options.group, [queue])
        self.leases.streams.update(self.keys.streams(queue))
        _, entries = getter.fetch((queue,), 1)
        if not entries:
            raise Empty
        entry, fields = entries[0]
        self.leases.hold([entry])
        try:
            return self._message_of(entry, fields)
        except codec.Undecodable as error:
            self.leases.bury(entry.tag, f"undecodable: {error}")
            raise Empty from error

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        message = super().basic_get(queue, no_ack=no_ack, **kwargs)
        if message is not None and no_ack:
            self.leases.ack(str(message.delivery_tag))
        return message

    # ---- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self.closed and os.getpid() == self._pid:
            for reader in (self.reader, self.broadcasts):
                if reader is not None:
                    reader.stop()
            super().close()
            self.leases.close()
        elif not self.closed:
            self.closed = True

    def abandon(self) -> None:
        """The connection is lost: read no more, keep what is worked on, talk to nobody."""
        self.closed = True
        if os.getpid() != self._pid:
            return
        for reader in (self.reader, self.broadcasts):
            if reader is not None:
                reader.abandon()
        if self.reader is not None:
            self.reader.buffer.clear()
        self.leases.leave()
