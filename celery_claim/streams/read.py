"""Read messages of a consumer group: as many as there is room for, then wait for the next one."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from redis.exceptions import OutOfMemoryError

from celery_claim.streams import scripts
from celery_claim.streams.consumer_group import group_is_missing
from celery_claim.streams.lease import Entry, Leases
from celery_claim.streams.options import StreamOptions
from celery_claim.streams.wire.keys import Keys

logger = logging.getLogger("celery_claim.streams")

#: Seconds after which a consumer without room looks again, should nobody have told it.
LOOK_AGAIN_SECONDS = 0.05
#: Seconds between two tries to end a read that is about to wait but has not reached the server yet.
UNBLOCK_AGAIN_SECONDS = 0.002
#: Longest time until abandoned messages are looked at again that must wait for each other.
LATER_SECONDS = 1.0
#: And how many: on a connection that is dead without knowing it, no try will help.
UNBLOCK_TRIES = 50


#: Seconds between two tries to make a queue on a server that is full.
FULL_SECONDS = 1.0


class Room(NamedTuple):
    """How many messages the consumer may take now, and how many it may hold."""

    free: int
    whole: int


class Read(NamedTuple):
    """A message as it was read."""

    tag: str
    entry: Entry
    fields: dict[bytes, bytes]


class Host(Protocol):
    """What a reader asks of the channel it reads for; called from the reader's thread."""

    def room(self) -> Room:
        """How much may be read."""

    def on_ready(self) -> None:
        """The buffer has something, or the reader ended with an error."""

    def on_dead(self, read: Read, reason: str) -> None:
        """A message became a dead letter."""

    def declare(self, queues: tuple[str, ...]) -> None:
        """Make the keys of queues that are missing."""

    def tend(self, queues: tuple[str, ...]) -> float:
        """Keep queues that are read from expiring, and tidy up after others; seconds until the next time."""


class Reader(threading.Thread):
    """Reads the queues of one channel into a buffer; an error ends it and is kept in `error`.

    It refers to the channel weakly, and ends with it.
    """

    def __init__(self, client: Any, keys: Keys, options: StreamOptions, leases: Leases, host: Host) -> None:
        super().__init__(name="celery_claim-reader", daemon=True)
        self.client, self.keys, self.options, self.leases = client, keys, options, leases
        self.host: Host = weakref.proxy(host)
        self.buffer: deque[Read] = deque()
        self.error: Exception | None = None
        self._queues: tuple[str, ...] = ()
        self._turn = 0
        self._wake = threading.Event()
        #: Places that must get free before this thread is woken, and how many have.
        self._wanted, self._freed = 1, 0
        self._waiting = self._stopping = False
        self._client_id: int | None = None
        self._recover_at = time.monotonic() + options.recovery_grace
        self._tend_at = 0.0
        #: When the next delayed message is due, as far as we know.
        self._due_at = math.inf

    # ---- what other threads ask for -------------------------------------------------------------------------

    def consume(self, queues: tuple[str, ...]) -> None:
        """Read these queues from now on."""
        self._declare(tuple(set(queues) - set(self._queues)))
        self._queues, self._tend_at = queues, 0.0
        self.leases.queues.update(queues)
        self.unblock()

    def on_room(self) -> None:
        """A place is free; the thread is woken when there are enough of them, for each waking costs the worker."""
        self._freed += 1
        if self._freed >= self._wanted:
            self._wake.set()

    def unblock(self) -> None:
        """End a waiting read early; where the server does not allow it, it ends by itself."""
        self._wake.set()
        for _ in range(UNBLOCK_TRIES):
            if not self._waiting or self._client_id is None or not self.is_alive():
                return
            try:
                if self.leases.client.execute_command("CLIENT", "UNBLOCK", self._client_id):
                    return
            except Exception as error:
                logger.debug("a waiting read ends by itself: %s", error)
                return
            # The read has been decided on and is still on its way to the server.
            time.sleep(UNBLOCK_AGAIN_SECONDS)

    def stop(self) -> None:
        """Read no more; what the server hands out meanwhile is given back by the leases' end."""
        self._stopping = True
        self.unblock()
        if self is not threading.current_thread() and self.is_alive():
            self.join(self.options.block_timeout + 1)

    def abandon(self) -> None:
        """The connection is lost: end as soon as possible, without talking to the server."""
        self._stopping = True
        self._wake.set()
        self.client.connection_pool.disconnect()

    def _declare(self, queues: tuple[str, ...]) -> bool:
        """Make the keys of queues; False on a server that is full, which must not keep us from emptying the others."""
        try:
            self.host.declare(queues)
        except OutOfMemoryError as error:
            logger.warning("queues %s cannot be made: %s", ", ".join(queues), error)
            return False
        return True

    # ---- the thread -----------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            try:
                self._client_id = self.client.execute_command("CLIENT", "ID")
                # Who looks at a queue tells by the name which of its consumers are connected.
                self.client.execute_command("CLIENT", "SETNAME", self.leases.consumer)
            except Exception as error:
                logger.debug("reads cannot be ended early: %s", error)
            while not self._stopping:
                self._read_once()
        except ReferenceError:
            # The channel was dropped without being closed.
            self.leases.leave()
        except Exception as error:
            if not self._stopping:
                self.error = error
                with contextlib.suppress(ReferenceError):
                    self.host.on_ready()
        finally:
            self.client.close()

    def _read_once(self) -> None:
        queues = self._queues
        if not queues:
            self._wake.wait(self.options.block_timeout)
            self._wake.clear()
            return
        room = self._enough_room()
        now = time.monotonic()
        # Without room for them, messages that are due are still moved: another worker may be waiting.
        if room <= 0 and now < self._due_at:
            return
        try:
            if now >= self._tend_at:
                self._tend_at = now + self.host.tend(queues)
            reads = self.fetch(queues, room)
            if room > 0 and not reads and not self._stopping:
                self.leases.flush_or_leave_it()
                reads = self._wait(queues, self._patience())
        except Exception as error:
            if not group_is_missing(error):
                raise
            if not self._declare(queues):
                # Nothing else would slow this down until there is room on the server.
                self._wake.wait(FULL_SECONDS)
            return
        if reads:
            self._hand_over(reads, room)

    def _enough_room(self) -> int:
        """How many messages to read now; 0 is to look again. Few large reads cost less than many small ones."""
        self._wake.clear()
        self._freed = 0
        free, whole = self.host.room()
        whole = min(whole, self.options.fetch_batch)
        enough = max(1, whole // 2)
        if free < enough:
            hungry = not self.buffer
            self._wanted = 1 if hungry and free <= 0 else enough - free
            if hungry and free > 0:
                # The pool may be idle, so a moment only: the shorter, the fewer messages it may hold.
                self._wake.wait(self.options.ack_delay * min(1.0, whole / self.options.fetch_batch))
                free, _ = self.host.room()
            else:
                self._wake.wait(LOOK_AGAIN_SECONDS)
                return 0
        return min(free, self.options.fetch_batch)

    def _patience(self) -> float:
        """Seconds to wait for a message before something else is due."""
        until = min(self._recover_at, self._tend_at, self._due_at) - time.monotonic()
        return min(self.options.block_timeout, max(until, 0.001))

    def fetch(self, queues: tuple[str, ...], room: int) -> list[Read]:
        """Up to `room` messages without waiting; delayed ones that are due are moved in before."""
        names, owners = [], []
        for queue in self._in_order(queues):
            of_queue = self.keys.to_fetch(queue)
            names += of_queue
            owners += [queue] * len(of_queue)
        now = time.monotonic()
        recover = now >= self._recover_at
        options = self.options
        next_due, taken, dead, gone, left_for_later = scripts.run(
            self.client, "fetch", names,
            [
                options.group, self.leases.consumer, room, int(options.lease_timeout * 1000), int(recover),
                options.delivery_limit, options.dead_letter_maxlen, int(options.requeue_backoff_max * 1000),
                len(self.keys.steps), options.delayed_batch,
            ],
        )  # fmt: skip
        if recover:
            # Jitter only shortens: the promise is an upper bound.
            interval = min(options.recovery_interval, LATER_SECONDS) if left_for_later else options.recovery_interval
            self._recover_at = now + interval * random.uniform(0.8, 1)

        def read(index: int, id_: bytes, deliveries: int, words: list[bytes]) -> Read:
            fields = dict(zip(words[::2], words[1::2], strict=True))
            return _read(owners[index - 1], names[index - 1], id_, deliveries, fields)

        for index, id_ in gone:
            logger.warning(
                "pending message %s of queue %s has no message any more: somebody deleted or trimmed it",
                id_.decode(), owners[index - 1],
            )  # fmt: skip
        for each in dead:
            self.host.on_dead(read(*each), "delivery limit")
        self._due_at = now + next_due / 1000 if next_due >= 0 else math.inf
        return [read(*each) for each in taken]

    def _in_order(self, queues: tuple[str, ...]) -> tuple[str, ...]:
        """The queues, the one that is served first in front."""
        if self.options.queue_order_strategy == "sorted":
            return tuple(sorted(queues))
        if self.options.queue_order_strategy == "priority":
            return queues
        self._turn += 1
        turn = self._turn % len(queues)
        return queues[turn:] + queues[:turn]

    def _wait(self, queues: tuple[str, ...], seconds: float) -> list[Read]:
        streams = {stream: queue for queue in queues for stream in self.keys.streams(queue)}
        names = [*streams, *(self.keys.wake(queue) for queue in queues)]
        self._waiting = True
        try:
            # After the flag is up: who wakes us before it is seen here, who wakes us later ends the read.
            if self._wake.is_set() or self._stopping:
                return []
            reply = self.client.execute_command(
                "XREADGROUP", "GROUP", self.options.group, self.leases.consumer, "COUNT", 1,
                "BLOCK", max(1, int(seconds * 1000)), "STREAMS", *names, *(">" for _ in names),
            )  # fmt: skip
        finally:
            self._waiting = False
        return list(self._parse(reply or [], streams))

    def _parse(self, reply: Any, streams: dict[str, str]) -> Iterator[Read]:
        for name, entries in reply:
            stream = name.decode()
            for id_, fields in entries:
                if stream in streams:
                    yield _read(streams[stream], stream, id_, 1, fields)
                else:
                    # A call to look again, which is what follows.
                    scripts.run(self.client, "settle", [stream], [self.options.group, 1, id_])

    def _hand_over(self, reads: list[Read], room: int) -> None:
        self.leases.hold((read.tag, read.entry) for read in reads)
        # One blocked read may return a message of every stream, which is more than there is room for.
        wanted = [read for read in reads[:room] if read.entry.queue in self._queues]
        if len(wanted) < len(reads):
            self.leases.release({read.tag for read in reads} - {read.tag for read in wanted})
        self.buffer.extend(wanted)
        self.host.on_ready()


def _read(queue: str, stream: str, id_: bytes, deliveries: int, fields: dict[bytes, bytes]) -> Read:
    entry = Entry(queue, stream, id_.decode(), deliveries)
    return Read(entry.tag, entry, fields)
