"""A kombu channel over streams: publish, consume within the prefetch, acknowledge, declare."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from queue import Empty
from typing import Any

from kombu.exceptions import InconsistencyError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments  # type: ignore[attr-defined]
from redis.exceptions import ResponseError

from celery_claim.streams import append, broadcast, scripts
from celery_claim.streams.append import Write
from celery_claim.transport import publish
from celery_claim.transport.inbox import Inbox
from celery_claim.transport.qos import QoS

logger = logging.getLogger("celery_claim.streams")


#: The delivery mode of messages that need not survive.
TRANSIENT = 1


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
        self.inbox = Inbox(self)
        self.leases = self.inbox.leases
        #: Takes what would publish a message, instead of the server.
        self.collect: Callable[[Write], None] | None = None
        self._pid = os.getpid()

    # ---- publish --------------------------------------------------------------------------------------------

    def basic_publish(
        self,
        message: dict[str, Any] | str,
        exchange: str,
        routing_key: str,
        batch: Callable[[Write], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Publish now, or hand what publishes to a batch."""
        if batch is not None:
            kwargs["batch"] = batch
        if isinstance(message, str):
            # `celery amqp` publishes plain text.
            message = self.prepare_message(message)
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
        # A transient message is a reply, or an event, that nobody waits for any more. To kombu the error would be a
        # lost connection, for every answer that comes after `celery inspect` gave up.
        lasting = message["properties"].get("delivery_mode") != TRANSIENT
        if not queues and lasting and self.typeof(exchange).type == "direct" and not self.routes.bindings(exchange):
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
            broadcast.remember(self.client, self.connection.positions, self.keys.fanout(exchange), queue)
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
            self.inbox.no_ack.add(queue)
        if queue in self.routes.broadcasts:
            self.inbox.listen_to(queue)
        else:
            self.inbox.read_from(self._task_queues())

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is None or self.closed:
            return
        self.inbox.no_ack.discard(queue)
        if queue in self.routes.broadcasts:
            self.inbox.stop_listening(queue)
        else:
            self.inbox.read_from(self._task_queues())

    def _task_queues(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(queue for queue in self._active_queues if queue not in self.routes.broadcasts))

    def deliver_one(self) -> bool:
        """Hand the next message to its consumer; False when there is none. A lost connection is raised here."""
        return self.inbox.deliver_one()

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        message = self.inbox.get(queue)
        if message is None:
            raise Empty
        return message

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        message = super().basic_get(queue, no_ack=no_ack, **kwargs)
        if message is not None and no_ack:
            self.leases.ack(str(message.delivery_tag))
        return message

    # ---- let go ---------------------------------------------------------------------------------------------

    def bury(self, tag: str, reason: str) -> None:
        """Make a dead letter of a message that this channel delivered."""
        self.inbox.bury(tag, reason)

    def stop_reading(self) -> int:
        """Read no more, and give back what no consumer has got yet: how many. What was delivered stays ours."""
        return self.inbox.stop_reading()

    def give_back(self, tags: list[str]) -> int:
        """Hand messages that were not started to other workers, at once, in their order and uncounted: how many."""
        self.leases.release(tags)
        return len(tags)

    def close(self) -> None:
        if not self.closed and os.getpid() == self._pid:
            self.inbox.close()
            super().close()
            self.leases.close()
        # In a child process the threads and the sockets are the parent's.
        self.closed = True

    def abandon(self) -> None:
        """The connection is lost: read no more, keep what is worked on, talk to nobody."""
        self.closed = True
        if os.getpid() == self._pid:
            self.inbox.abandon()
