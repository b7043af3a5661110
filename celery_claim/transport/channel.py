"""A kombu channel over streams: publish, consume within the prefetch, acknowledge, declare."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from queue import Empty
from typing import Any

from kombu.exceptions import InconsistencyError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments  # type: ignore[attr-defined]
from redis.exceptions import ResponseError

from celery_claim.streams import append, broadcast, scripts
from celery_claim.streams.append import Write
from celery_claim.streams.broadcast import BroadcastReader
from celery_claim.streams.consumer_group import announce, ensure_groups
from celery_claim.streams.lease import Leases
from celery_claim.streams.read import Read, Reader, Room
from celery_claim.streams.wire import codec
from celery_claim.transport import publish, tell
from celery_claim.transport.qos import QoS

logger = logging.getLogger("celery_claim.streams")


#: Seconds within which a message that our own reader has read is in its buffer.
READER_SECONDS = 0.05


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
        self.leases.on_lost = tell.of_lost_lease
        self.reader: Reader | None = None
        self.broadcasts: BroadcastReader | None = None
        self._pid = os.getpid()
        self._no_ack: set[str] = set()
        self._delivering = False
        #: Takes what would publish a message, instead of the server.
        self.collect: Callable[[Write], None] | None = None

    # ---- publish --------------------------------------------------------------------------------------------

    def basic_publish(
        self,
        message: dict[str, Any],
        exchange: str,
        routing_key: str,
        batch: Callable[[Write], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Publish now, or hand what publishes to a batch."""
        if batch is not None:
            kwargs["batch"] = batch
        self._inplace_augment_message(message, exchange, routing_key)
        if not exchange:
            if not routing_key:
                logger.warning("a message without exchange and routing key leads nowhere: it was not published")
                return None
            return self._put(routing_key, message, **kwargs)
        if self.typeof(exchange).type == "fanout":
            return self._put_fanout(exchange, message, routing_key, **kwargs)
        queues = self._queues_for(exchange, routing_key)
        if not queues:
            # The server may have lost its keys.
            self.routes.bind_again(exchange)
            queues = self._queues_for(exchange, routing_key)
        if not queues and self.typeof(exchange).type == "direct" and not self.routes.bindings(exchange):
            raise InconsistencyError(f"exchange {exchange!r} has no queue for the routing key {routing_key!r}")
        # Otherwise as in AMQP: what nobody asked for goes nowhere.
        for queue, expires in queues.items():
            self._put(queue, dict(message), must_exist=expires, **kwargs)
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

    def _put(
        self,
        queue: str,
        message: dict[str, Any],
        *,
        must_exist: bool = False,
        batch: Callable[[Write], None] | None = None,
        **kwargs: Any,
    ) -> None:
        write = publish.write_for(self, queue, message, must_exist=must_exist)
        batch = batch or self.collect
        if batch is not None:
            batch(write)
        else:
            write.run(self.client)

    def _put_fanout(
        self,
        exchange: str,
        message: dict[str, Any],
        routing_key: str,
        batch: Callable[[Write], None] | None = None,
        **kwargs: Any,
    ) -> None:
        write = append.to_all(
            self.keys, exchange, routing_key or "", message, maxlen=self.options.fanout_maxlen
        )  # fmt: skip
        if batch is not None:
            batch(write)
        else:
            publish.broadcast(self.client, write)

    def create_publish_batch(self, max_size: int) -> publish.PublishBatch:
        """For `Producer.batch()` of kombu 5.7 and later."""
        return publish.PublishBatch(self, max_size)

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
            broadcast.remember(self.client, self.keys.fanout(exchange), queue)
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
            self.broadcasts = BroadcastReader(client, self.client, self.keys, self.options, self.connection.wake)
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
            self._give_back_unread(queue)

    def _read_queues(self) -> None:
        assert self.reader is not None
        work = dict.fromkeys(queue for queue in self._active_queues if queue not in self.routes.broadcasts)
        self.reader.consume(tuple(work))

    def _give_back_unread(self, queue: str) -> None:
        """What was read for a consumer that is gone; the few that are read at this moment are given back later."""
        assert self.reader is not None
        unread = list(self.reader.buffer)
        gone = [read for read in unread if read.entry.queue == queue]
        for read in gone:
            with contextlib.suppress(ValueError):
                self.reader.buffer.remove(read)
        self.leases.release([read.tag for read in gone])

    # ---- what the reader asks for, from its thread ----------------------------------------------------------

    def room(self) -> Room:
        unread = len(self.reader.buffer) if self.reader is not None else 0
        quota: Any = self.qos
        room: Room = quota.room(unread=unread, delivering=self._delivering)
        return room

    def on_ready(self) -> None:
        self.connection.wake()

    def on_dead(self, read: Read, reason: str) -> None:
        tell.of_death(read, reason)

    def declare(self, queues: tuple[str, ...]) -> None:
        ensure_groups(self.client, self.keys, self.options.group, queues)
        announce(self.client, self.keys, self.options.group, queues, self.leases.consumer)
        self.routes.write_again(queues)

    def tend(self, queues: tuple[str, ...]) -> float:
        # Read by many, a queue is tidied by each of them now and then: no matter, and nobody need be elected.
        for queue in queues:
            names = [self.keys.wake(queue), *self.keys.streams(queue)]
            scripts.run(self.client, "reap", names, [self.options.group, int(self.options.consumer_reap_after * 1000)])
        announce(self.client, self.keys, self.options.group, queues, self.leases.consumer)
        again: float = min(self.routes.keep_alive(queues), self.options.consumer_reap_after)
        return again

    def _on_room(self) -> None:
        if self.reader is not None:
            self.reader.on_room()

    # ---- deliver --------------------------------------------------------------------------------------------

    def deliver_one(self) -> bool:
        """Hand the next message to its consumer; False when there is none. A reader's error is raised here."""
        broadcasts, reader = self.broadcasts, self.reader
        for thread in (broadcasts, reader):
            if thread is not None and thread.error is not None:
                raise thread.error
        while broadcasts is not None and broadcasts.buffer:
            if self._deliver_broadcast(*broadcasts.buffer.popleft()):
                return True
        while reader is not None and reader.buffer:
            self._delivering = True
            try:
                if self._deliver_read(reader.buffer.popleft()):
                    return True
            finally:
                self._delivering = False
        return False

    def _deliver_broadcast(self, queue: str, id_: str, fields: dict[bytes, bytes]) -> bool:
        callback = self.connection._callbacks.get(queue)
        if callback is None:
            return False
        try:
            message = codec.decode(fields, queue)
        except codec.Undecodable as error:
            logger.error("a broadcast to %s cannot be read: %s", queue, error)
            return False
        message["properties"]["delivery_tag"] = f"{id_}/{queue}"
        callback(message)
        return True

    def _deliver_read(self, read: Read) -> bool:
        queue = read.entry.queue
        callback = self.connection._callbacks.get(queue)
        if callback is None:
            self.leases.release([read.tag])
            return False
        try:
            message = self._message_of(read)
        except codec.Undecodable as error:
            self._bury_undecodable(read, error)
            return False
        if self._has_expired(message, read):
            self.leases.ack(read.tag)
            return False
        if queue in self._no_ack:
            self.leases.ack(read.tag)
        callback(message)
        return True

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
        self.bury(read.tag, f"undecodable: {error}")

    def bury(self, tag: str, reason: str) -> None:
        """Make a dead letter of a message that this channel delivered."""
        buried = self.leases.bury(tag, reason)
        if buried is not None:
            self.on_dead(Read(tag, *buried), reason)

    def stop_reading(self) -> int:
        """Read no more, and give back what no consumer has got yet: how many. What was delivered stays ours."""
        if self.reader is None:
            return 0
        self.reader.stop()
        unseen = []
        while self.reader.buffer:
            unseen.append(self.reader.buffer.popleft().tag)
        return self.give_back(unseen)

    def give_back(self, tags: list[str]) -> int:
        """Hand messages that were not started to other workers, at once, in their order and uncounted: how many."""
        self.leases.release(tags)
        return len(tags)

    @staticmethod
    def _message_of(read: Read) -> dict[str, Any]:
        message = codec.decode(read.fields, read.entry.queue)
        properties = message["properties"]
        properties["delivery_tag"] = read.tag
        if read.entry.deliveries > 1:
            properties["delivery_info"]["redelivered"] = True
            message["headers"]["x-delivery-count"] = read.entry.deliveries
        return message

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        if queue in self.routes.broadcasts:
            return self._get_broadcast(queue)
        read = self._take_unread(queue) or self._read_one(queue)
        if read is None and queue in self._active_queues:
            # Our own reader may have been quicker.
            read = self._wait_for_unread(queue)
        if read is None:
            raise Empty
        try:
            message = self._message_of(read)
        except codec.Undecodable as error:
            self._bury_undecodable(read, error)
        else:
            if not self._has_expired(message, read):
                return message
            self.leases.ack(read.tag)
        return self._get(queue)

    def _get_broadcast(self, queue: str) -> dict[str, Any]:
        exchange, _ = self.routes.broadcasts[queue]
        found = broadcast.get(self.client, self.keys.fanout(exchange), queue)
        if found is None:
            raise Empty
        id_, fields = found
        message = codec.decode(fields, queue)
        message["properties"]["delivery_tag"] = f"{id_}/{queue}"
        return message

    def _read_one(self, queue: str) -> Read | None:
        getter = Reader(self.client, self.keys, self.options, self.leases, self)
        self.declare((queue,))
        self.leases.queues.add(queue)
        reads = getter.fetch((queue,), 1)
        self.leases.hold([(read.tag, read.entry) for read in reads])
        return reads[0] if reads else None

    def _take_unread(self, queue: str) -> Read | None:
        for read in list(self.reader.buffer) if self.reader is not None else ():
            if read.entry.queue == queue:
                with contextlib.suppress(ValueError):
                    self.reader.buffer.remove(read)  # type: ignore[union-attr]
                    return read
        return None

    def _wait_for_unread(self, queue: str) -> Read | None:
        end = time.monotonic() + READER_SECONDS
        while (read := self._take_unread(queue)) is None and time.monotonic() < end:
            time.sleep(READER_SECONDS / 10)
        return read

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
