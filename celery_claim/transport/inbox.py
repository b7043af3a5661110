"""What one channel reads: handed to its consumers one by one, given back, or made a dead letter."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from celery_claim.streams import broadcast, scripts
from celery_claim.streams.broadcast import BroadcastReader
from celery_claim.streams.consumer_group import announce, ensure_groups
from celery_claim.streams.lease import Leases
from celery_claim.streams.read import Read, Reader, Room
from celery_claim.streams.wire import codec
from celery_claim.transport import tell

logger = logging.getLogger("celery_claim.streams")

#: Seconds within which a message that our own reader has read is in its buffer.
READER_SECONDS = 0.05


class Inbox:
    """The readers of a channel and what they hold; starts a thread for tasks and one for broadcasts when needed."""

    def __init__(self, channel: Any) -> None:
        self.channel, self.transport = channel, channel.connection
        self.options, self.keys, self.client = channel.options, channel.keys, channel.client
        self.routes = channel.routes
        self.leases = Leases(self.client, self.keys, self.options, self.on_room)
        self.leases.on_lost = tell.of_lost_lease
        self.reader: Reader | None = None
        self.broadcasts: BroadcastReader | None = None
        self.no_ack: set[str] = set()
        self._queues: tuple[str, ...] = ()
        self._delivering = False

    # ---- what is read ---------------------------------------------------------------------------------------

    def read_from(self, queues: tuple[str, ...]) -> None:
        """Read these task queues from now on; what was read for another goes back."""
        gone, self._queues = set(self._queues) - set(queues), queues
        if self.reader is None and queues:
            self.reader = Reader(self.transport.open(single=True), self.keys, self.options, self.leases, self)
            self.reader.consume(queues)
            self.reader.start()
        elif self.reader is not None:
            self.reader.consume(queues)
            self.leases.release([read.tag for queue in gone for read in self._take_unread(queue)])

    def listen_to(self, queue: str) -> None:
        """Read the broadcasts of a bound queue."""
        new = self.broadcasts is None
        if self.broadcasts is None:
            client = self.transport.open(single=True)
            self.broadcasts = BroadcastReader(
                client, self.client, self.keys, self.options, self.transport.positions, self.transport.wake
            )
        self.broadcasts.bind(queue, *self.routes.broadcasts[queue])
        if new:
            self.broadcasts.start()

    def stop_listening(self, queue: str) -> None:
        if self.broadcasts is not None:
            self.broadcasts.unbind(queue)

    # ---- what a reader asks for, from its thread ------------------------------------------------------------

    def room(self) -> Room:
        unread = len(self.reader.buffer) if self.reader is not None else 0
        room: Room = self.channel.qos.room(unread=unread, delivering=self._delivering)
        return room

    def on_room(self) -> None:
        if self.reader is not None:
            self.reader.on_room()

    def on_ready(self) -> None:
        self.transport.wake()

    def on_dead(self, read: Read, reason: str) -> None:
        tell.of_death(read, reason)

    def declare(self, queues: tuple[str, ...]) -> None:
        ensure_groups(self.client, self.keys, self.options.group, queues, self.routes.expiring)
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
        callback = self.transport._callbacks.get(queue)
        if callback is None:
            return False
        try:
            message = self._message_of_broadcast(queue, id_, fields)
        except codec.Undecodable as error:
            logger.error("a broadcast to %s cannot be read: %s", queue, error)
            return False
        callback(message)
        return True

    def _deliver_read(self, read: Read) -> bool:
        queue = read.entry.queue
        callback = self.transport._callbacks.get(queue)
        if callback is None:
            self.leases.release([read.tag])
            return False
        message = self._message_of(read)
        if message is None:
            return False
        if queue in self.no_ack:
            self.leases.ack(read.tag)
        callback(message)
        return True

    def get(self, queue: str) -> dict[str, Any] | None:
        """The next message of a queue without waiting for one."""
        if queue in self.routes.broadcasts:
            exchange, _ = self.routes.broadcasts[queue]
            found = broadcast.get(self.client, self.transport.positions, self.keys.fanout(exchange), queue)
            return self._message_of_broadcast(queue, *found) if found is not None else None
        while (read := self._get_read(queue)) is not None:
            message = self._message_of(read)
            if message is not None:
                return message
        return None

    def _get_read(self, queue: str) -> Read | None:
        end = time.monotonic() + READER_SECONDS
        if unread := self._take_unread(queue, most=1):
            return unread[0]
        self.declare((queue,))
        self.leases.queues.add(queue)
        reads = Reader(self.client, self.keys, self.options, self.leases, self).fetch((queue,), 1)
        self.leases.hold([(read.tag, read.entry) for read in reads])
        while not reads and queue in self._queues and time.monotonic() < end:
            # Our own reader may have been quicker.
            time.sleep(READER_SECONDS / 10)
            reads = self._take_unread(queue, most=1)
        return reads[0] if reads else None

    def _take_unread(self, queue: str, most: int | None = None) -> list[Read]:
        """Out of the buffer, from which another thread may take at the same time."""
        taken: list[Read] = []
        for read in list(self.reader.buffer) if self.reader is not None else ():
            if read.entry.queue == queue and len(taken) != most:
                with contextlib.suppress(ValueError):
                    self.reader.buffer.remove(read)  # type: ignore[union-attr]
                    taken.append(read)
        return taken

    # ---- from entry to message ------------------------------------------------------------------------------

    def _message_of(self, read: Read) -> dict[str, Any] | None:
        """The message to deliver; None when it is a dead letter now, or expired."""
        try:
            message = codec.decode(read.fields, read.entry.queue)
        except codec.Undecodable as error:
            self.bury(read.tag, f"undecodable: {error}")
            return None
        if self._has_expired(message, read):
            self.leases.ack(read.tag)
            return None
        properties = message["properties"]
        properties["delivery_tag"] = read.tag
        if read.entry.deliveries > 1:
            properties["delivery_info"]["redelivered"] = True
            message["headers"]["x-delivery-count"] = read.entry.deliveries
        return message

    def _message_of_broadcast(self, queue: str, id_: str, fields: dict[bytes, bytes]) -> dict[str, Any]:
        message = codec.decode(fields, queue)
        message["properties"]["delivery_tag"] = f"{id_}/{queue}"
        return message

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

    # ---- let go ---------------------------------------------------------------------------------------------

    def bury(self, tag: str, reason: str) -> None:
        """Make a dead letter of a message that is held."""
        buried = self.leases.bury(tag, reason)
        if buried is not None:
            self.on_dead(Read(tag, *buried), reason)

    def stop_reading(self) -> int:
        """Read no more tasks, and give back what no consumer has got yet: how many. What was delivered stays ours."""
        if self.reader is None:
            return 0
        self.reader.stop()
        unread = [read.tag for queue in self._queues for read in self._take_unread(queue)]
        self.leases.release(unread)
        return len(unread)

    def close(self) -> None:
        """An orderly end of all reading; what is held is the leases' to give back."""
        for reader in (self.reader, self.broadcasts):
            if reader is not None:
                reader.stop()

    def abandon(self) -> None:
        """The connection is lost: read no more, keep what is worked on, talk to nobody."""
        for reader in (self.reader, self.broadcasts):
            if reader is not None:
                reader.abandon()
        if self.reader is not None:
            self.reader.buffer.clear()
        self.leases.leave()
