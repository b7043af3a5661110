"""A kombu channel over streams: publish, consume within the prefetch, acknowledge, declare."""

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
from celery_claim.streams.lease import Leases
from celery_claim.streams.read import Read, Reader, Room
from celery_claim.streams.wire import codec
from celery_claim.transport.qos import QoS

logger = logging.getLogger("celery_claim.streams")


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
        self.routes = connection.routes
        self.leases = Leases(self.client, self.keys, self.options, self._on_room)
        self.reader: Reader | None = None
        self.broadcasts: BroadcastReader | None = None
        self._pid = os.getpid()
        self._no_ack: set[str] = set()
        self._delivering = False

    # ---- publish --------------------------------------------------------------------------------------------

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> Any:
        self._inplace_augment_message(message, exchange, routing_key)
        if not exchange:
            return self._put(routing_key, message)
        if self.typeof(exchange).type == "fanout":
            return self._put_fanout(exchange, message, routing_key)
        queues = self._queues_for(exchange, routing_key)
        if not queues:
            # The server may have lost its keys.
            self.routes.bind_again(exchange)
            queues = self._queues_for(exchange, routing_key)
        if not queues:
            raise InconsistencyError(f"exchange {exchange!r} has no queue for the routing key {routing_key!r}")
        for queue, expires in queues.items():
            self._put(queue, dict(message), must_exist=expires)
        return None

    def _inplace_augment_message(self, message: dict[str, Any], exchange: Any, routing_key: Any) -> None:
        properties = message["properties"]
        properties["delivery_tag"] = self._next_delivery_tag()
        properties.setdefault("delivery_info", {}).update(exchange=exchange, routing_key=routing_key)

    def _queues_for(self, exchange: str, routing_key: str) -> dict[str, bool]:
        """The queues for a routing key, and whether each must still exist when it is published to."""
        kind = self.typeof(exchange)
        bindings = self.routes.bindings(exchange)
        table = [kind.prepare_bind(each.queue, exchange, each.routing_key, None) for each in bindings]
        expiring = {each.queue for each in bindings if each.expires}
        return {queue: queue in expiring for queue in kind.lookup(table, exchange, routing_key, None)}

    def _put(self, queue: str, message: dict[str, Any], *, must_exist: bool = False, **kwargs: Any) -> None:
        priority = self._get_message_priority(message, reverse=self.options.priority_order == "amqp")
        step = self.keys.step_of(priority)
        wait = self._seconds_until_due(message)
        if wait >= self.options.delayed_min and self.options.delayed_delivery:
            headers = dict(message["headers"])
            # Moved away, so that no worker's clock delays the message a second time.
            headers["x-eta"] = headers.pop("eta")
            append.delay(self.client, self.keys, queue, step, {**message, "headers": headers}, seconds=wait)
            return
        append.append(self.client, self.keys, queue, step, message, expires=must_exist)

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

    # ---- exchanges, bindings, queues ------------------------------------------------------------------------

    def exchange_declare(  # type: ignore[override]
        self, exchange: str | None = None, type: str = "direct", **kwargs: Any
    ) -> None:
        super().exchange_declare(exchange=exchange, type=type, **kwargs)
        if exchange and type and type != "direct" and not kwargs.get("passive"):
            self.routes.declare_exchange(exchange, type)

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        declared = self.connection.state.exchanges.get(exchange, {}).get("type", default)
        if declared == "direct" and exchange:
            declared = self.routes.kind_of(exchange) or declared
        return self.exchange_types[declared]

    def _queue_bind(self, exchange: str, routing_key: str, pattern: Any, queue: str) -> None:
        if self.typeof(exchange).type == "fanout":
            self.routes.broadcasts[queue] = (exchange, routing_key or "")
        else:
            self.routes.bind(exchange, routing_key or "", queue)

    def get_table(self, exchange: str) -> list[tuple[str, Any, str]]:
        kind = self.typeof(exchange)
        return [
            kind.prepare_bind(each.queue, exchange, each.routing_key, None) for each in self.routes.bindings(exchange)
        ]

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        if queue not in self.routes.broadcasts:
            self.routes.declare_queue(queue, kwargs.get("arguments") or {})

    def prepare_queue_arguments(self, arguments: dict[str, Any] | None, **kwargs: Any) -> dict[str, Any]:
        return dict(to_rabbitmq_queue_arguments(arguments or {}, **kwargs))

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
        names = [self.keys.due(queue), self.keys.delayed(queue), *self.keys.streams(queue)]
        return int(scripts.run(self.client, "purge", names, [self.options.group]))

    def _delete(self, queue: str, exchange: str = "", routing_key: str = "", *args: Any, **kwargs: Any) -> None:
        if exchange:
            self.routes.unbind(exchange, routing_key or "", queue)

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        if if_empty and self._size(queue):
            return
        super().queue_delete(queue, if_unused, False, **kwargs)
        if queue not in self.routes.broadcasts:
            self.routes.forget_queue(queue)

    # ---- consume --------------------------------------------------------------------------------------------

    def basic_consume(  # type: ignore[override]
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> None:
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        if no_ack:
            self._no_ack.add(queue)
        if queue in self.routes.broadcasts:
            self._listen(queue, *self.routes.broadcasts[queue])
            return
        if self.reader is None:
            self.reader = Reader(self.connection.open(single=True), self.keys, self.options, self.leases, self)
            self._read_queues()
            self.reader.start()
        else:
            self._read_queues()

    def _listen(self, queue: str, exchange: str, routing_key: str) -> None:
        new = self.broadcasts is None
        if self.broadcasts is None:
            client = self.connection.open(single=True)
            self.broadcasts = BroadcastReader(client, self.client, self.keys, self.connection.wake)
        self.broadcasts.bind(queue, exchange, routing_key)
        if new:
            self.broadcasts.start()

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is None:
            return
        self._no_ack.discard(queue)
        if queue in self.routes.broadcasts:
            if self.broadcasts is not None:
                self.broadcasts.unbind(queue)
        elif self.reader is not None and not self.closed:
            self._read_queues()

    def _read_queues(self) -> None:
        assert self.reader is not None
        work = dict.fromkeys(queue for queue in self._active_queues if queue not in self.routes.broadcasts)
        self.reader.consume(tuple(work))

    # ---- what the reader asks for, from its thread ----------------------------------------------------------

    def room(self) -> Room:
        unread = len(self.reader.buffer) if self.reader is not None else 0
        quota: Any = self.qos
        room: Room = quota.room(unread=unread, delivering=self._delivering)
        return room

    def on_ready(self) -> None:
        self.connection.wake()

    def on_dead(self, read: Read, reason: str) -> None:
        logger.error(
            "message %s of queue %s is a dead letter after %d deliveries: %s",
            read.entry.id, read.entry.queue, read.entry.deliveries, reason,
        )  # fmt: skip

    def declare(self, queues: tuple[str, ...]) -> None:
        ensure_groups(self.client, self.keys, self.options.group, queues)
        self.routes.write_again(queues)

    def tend(self, queues: tuple[str, ...]) -> float:
        # Read by many, a queue is tidied by each of them now and then: no matter, and nobody need be elected.
        for queue in queues:
            names = [self.keys.wake(queue), *self.keys.streams(queue)]
            scripts.run(self.client, "reap", names, [self.options.group, int(self.options.consumer_reap_after * 1000)])
        again: float = min(self.routes.keep_alive(queues), self.options.consumer_reap_after)
        return again

    def _on_room(self) -> None:
        if self.reader is not None:
            self.reader.on_room()

    # ---- deliver --------------------------------------------------------------------------------------------

    def deliver_one(self) -> bool:
        """Hand the next message to its consumer; False when there is none. A reader's error is raised here."""
        broadcasts, reader = self.broadcasts, self.reader
        if broadcasts is not None and (broadcasts.buffer or broadcasts.error is not None):
            if broadcasts.error is not None:
                raise broadcasts.error
            self._deliver_broadcast(*broadcasts.buffer.popleft())
            return True
        if reader is None:
            return False
        if reader.error is not None:
            raise reader.error
        if not reader.buffer:
            return False
        self._delivering = True
        try:
            self._deliver_read(reader.buffer.popleft())
        finally:
            self._delivering = False
        return True

    def _deliver_broadcast(self, queue: str, id_: str, fields: dict[bytes, bytes]) -> None:
        callback = self.connection._callbacks.get(queue)
        if callback is None:
            return
        try:
            message = codec.decode(fields)
        except codec.Undecodable as error:
            logger.error("a broadcast to %s cannot be read: %s", queue, error)
            return
        message["properties"]["delivery_tag"] = f"{id_}/{queue}"
        callback(message)

    def _deliver_read(self, read: Read) -> None:
        queue = read.entry.queue
        callback = self.connection._callbacks.get(queue)
        if callback is None:
            self.leases.release([read.tag])
            return
        try:
            message = self._message_of(read)
        except codec.Undecodable as error:
            self._bury_undecodable(read, error)
            return
        if self._has_expired(message, read):
            self.leases.ack(read.tag)
            return
        if queue in self._no_ack:
            self.leases.ack(read.tag)
        callback(message)

    def _has_expired(self, message: dict[str, Any], read: Read) -> bool:
        """Whether a message with `expiration` (ms, as in AMQP) waited longer than that, by the server's clock."""
        expiration = message["properties"].get("expiration")
        if expiration is None:
            return False
        added = int(read.entry.id.partition("-")[0])
        expired: bool = self.routes.server_ms() > added + float(expiration)
        if expired:
            logger.info("message %s of queue %s expired before it was read", read.entry.id, read.entry.queue)
        return expired

    def _bury_undecodable(self, read: Read, error: codec.Undecodable) -> None:
        reason = f"undecodable: {error}"
        self.leases.bury(read.tag, reason)
        self.on_dead(read, reason)

    def bury(self, tag: str, reason: str) -> None:
        """Make a dead letter of a message that this channel delivered."""
        self.leases.bury(tag, reason)

    @staticmethod
    def _message_of(read: Read) -> dict[str, Any]:
        message = codec.decode(read.fields)
        properties = message["properties"]
        properties["delivery_tag"] = read.tag
        where = properties["delivery_info"]
        where.setdefault("exchange", "")
        where.setdefault("routing_key", read.entry.queue)
        if read.entry.deliveries > 1:
            where["redelivered"] = True
            message["headers"]["x-delivery-count"] = read.entry.deliveries
        return message

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        getter = Reader(self.client, self.keys, self.options, self.leases, self)
        self.declare((queue,))
        self.leases.queues.add(queue)
        reads = getter.fetch((queue,), 1)
        if not reads:
            raise Empty
        (read,) = reads
        self.leases.hold([(read.tag, read.entry)])
        try:
            message = self._message_of(read)
        except codec.Undecodable as error:
            self._bury_undecodable(read, error)
        else:
            if not self._has_expired(message, read):
                return message
            self.leases.ack(read.tag)
        return self._get(queue)

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
