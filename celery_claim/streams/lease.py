"""What one consumer holds: acknowledged in batches, renewed while it lives, given back when it lets go."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from celery_claim.streams import scripts
from celery_claim.streams.consumer_group import new_consumer_name
from celery_claim.streams.keeper import Keeper
from celery_claim.streams.options import StreamOptions
from celery_claim.streams.wire.keys import Keys

logger = logging.getLogger("celery_claim.streams")


class Entry(NamedTuple):
    """Where a message stands on the server."""

    queue: str
    stream: str
    id: str
    #: How often it was handed to a consumer, this time included.
    deliveries: int

    @property
    def tag(self) -> str:
        """The delivery tag: unique among all deliveries, so that a late answer never settles a later delivery."""
        return f"{self.id}/{self.deliveries}/{self.stream}"


def settle(client: Any, group: str, entries: Iterable[Entry]) -> None:
    """Acknowledge and delete messages."""
    ids: dict[str, list[str]] = {}
    for entry in entries:
        ids.setdefault(entry.stream, []).append(entry.id)
    arguments: list[Any] = [group]
    for of_stream in ids.values():
        arguments += [len(of_stream), *of_stream]
    scripts.run(client, "settle", list(ids), arguments)


class Leases:
    """The messages of one consumer name.

    After a connection loss the consumer is *left*: nothing more is read under its name, what is still worked on
    stays leased and can be acknowledged, and what the process dropped goes back to the queue.
    """

    #: Consumers of this process that still hold messages after their connection was lost.
    orphans: ClassVar[weakref.WeakSet[Leases]] = weakref.WeakSet()

    def __init__(self, client: Any, keys: Keys, options: StreamOptions, on_room: Callable[[], None]) -> None:
        self.client, self.keys, self.options = client, keys, options
        self.consumer = new_consumer_name()
        self.queues: set[str] = set()
        self.left = False
        self._pid = os.getpid()
        # Weakly: the keeper's thread must not keep a channel alive that its owner has dropped.
        self._tell_of_room = weakref.WeakMethod(on_room)
        #: Told of each message whose lease was lost, by the keeper's thread.
        self.on_lost: Callable[[Entry], None] = lambda entry: None
        self._held: dict[str, Entry] = {}
        self._messages: dict[str, weakref.ref[Any]] = {}
        #: Tags of those still held here whose lease is known to be lost.
        self._lost: set[str] = set()
        self._acked: dict[str, Entry] = {}
        #: When the oldest of them was acknowledged, by the monotonic clock.
        self._oldest_ack = 0.0
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._keeper = Keeper(self, options)

    def __len__(self) -> int:
        return len(self._held)

    def _on_room(self) -> None:
        tell = self._tell_of_room()
        if tell is not None:
            tell()

    # ---- hold and let go ------------------------------------------------------------------------------------

    def hold(self, entries: Iterable[tuple[str, Entry]]) -> None:
        """Count entries, each with its tag, as ours from the moment they were read."""
        with self._lock:
            self._held.update(entries)
        self._keeper.start()

    def deliver(self, tag: str, message: Any) -> None:
        """Remember the message object: after a connection loss it tells whether anybody still works on it."""
        if tag in self._held:
            self._messages[tag] = weakref.ref(message)

    def ack(self, tag: str) -> None:
        """Acknowledge with the next batch. A kill -9 before that repeats the tasks of one batch, at most."""
        with self._lock:
            entry = self._held.pop(tag, None)
            self._messages.pop(tag, None)
            if entry is None:
                return
            if not self._acked:
                self._oldest_ack = time.monotonic()
            self._acked[tag] = entry
            full = len(self._acked) >= self.options.ack_batch
        self._on_room()
        if full:
            self.flush_or_leave_it()
        else:
            self._keeper.expect_acks()

    @property
    def flush_at(self) -> float | None:
        """When finished messages must be acknowledged, by the monotonic clock; None without any."""
        return self._oldest_ack + self.options.ack_delay if self._acked else None

    def flush_or_leave_it(self) -> None:
        """Acknowledge now; without a server the batch is kept, and the keeper tries again."""
        try:
            self.flush()
        except Exception as error:
            logger.debug("acknowledgements are kept: %s", error)

    def flush(self) -> None:
        """Acknowledge what is finished; on an error nothing of it is forgotten."""
        if os.getpid() != self._pid or not self._acked:
            return
        with self._flushing:
            with self._lock:
                batch = dict(self._acked)
            if not batch:
                return
            settle(self.client, self.options.group, batch.values())
            with self._lock:
                for tag in batch:
                    del self._acked[tag]
                self._oldest_ack = time.monotonic()

    def release(self, tags: Iterable[str], *, counted: bool = False) -> None:
        """Give messages back to the queue: uncounted when they were never started."""
        with self._lock:
            entries = {tag: entry for tag in tags if (entry := self._held.get(tag)) is not None}
        by_queue: dict[str, dict[str, Entry]] = {}
        for tag, entry in entries.items():
            by_queue.setdefault(entry.queue, {})[tag] = entry
        for queue, group in by_queue.items():
            scripts.run(
                self.client,
                "release",
                [self.keys.wake(queue), *(entry.stream for entry in group.values())],
                [self.options.group, self.consumer, "1" if counted else "0", *(entry.id for entry in group.values())],
            )
            self._forget(group)
        self._on_room()

    def release_all(self) -> None:
        """Give back everything that is not acknowledged."""
        self.release(list(self._held))

    def bury(self, tag: str, reason: str) -> tuple[Entry, dict[bytes, bytes]] | None:
        """Move a message to the dead letters of its queue; what it was, or None when it is no longer ours."""
        entry = self._held.get(tag)
        if entry is None:
            return None
        words = scripts.run(
            self.client,
            "bury",
            [entry.stream, self.keys.dead(entry.queue)],
            [self.options.group, self.consumer, entry.id, reason, self.options.dead_letter_maxlen],
        )
        self._forget((tag,))
        self._on_room()
        return None if words is None else (entry, dict(zip(words[::2], words[1::2], strict=True)))

    def _forget(self, tags: Iterable[str]) -> None:
        with self._lock:
            for tag in tags:
                self._held.pop(tag, None)
                self._messages.pop(tag, None)

    # ---- while it lives: called by the keeper ---------------------------------------------------------------

    def renew(self) -> None:
        """Renew what the server lists for this consumer, and tell of what it lists no more."""
        with self._lock:
            held = dict(self._held)
            names = [stream for queue in self.queues for stream in self.keys.streams(queue)]
        arguments = [self.options.group, self.consumer]
        if self.left:
            # Under a name that reads no more, a reply that was lost on the wire must not be renewed for ever.
            if not held:
                return
            names = [entry.stream for entry in held.values()]
            arguments += [entry.id for entry in held.values()]
        reply = scripts.run(self.client, "renew", names, arguments)
        owned = {(names[index - 1], id_.decode()) for index, *ids in reply for id_ in ids}
        self._lost &= held.keys()
        for tag, entry in held.items():
            if (entry.stream, entry.id) not in owned and tag in self._held:
                if tag not in self._lost:
                    self._lost.add(tag)
                    logger.warning(
                        "the lease of message %s of queue %s was lost: another worker may run it", entry.id, entry.queue
                    )
                    self.on_lost(entry)
                if self._dropped(tag):
                    # One that still runs keeps its place in the prefetch until it ends.
                    self._forget((tag,))
                    self._on_room()

    def let_go_of_dropped(self) -> None:
        """After a connection loss, give back what the worker threw away instead of running it."""
        dropped = [tag for tag in list(self._held) if self._dropped(tag)]
        if dropped:
            self.release(dropped)

    def _dropped(self, tag: str) -> bool:
        ref = self._messages.get(tag)
        return ref() is None if ref is not None else self.left

    # ---- the end --------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is held and nothing waits for its acknowledgement."""
        return not self._held and not self._acked

    def leave(self) -> None:
        """The connection is lost: keep what is worked on, and let the keeper give back what nobody refers to."""
        self.left = True
        if not self.idle:
            self.orphans.add(self)
        self._keeper.look()

    def close(self) -> None:
        """An orderly end: acknowledge what is finished, give back the rest, remove the consumer's name."""
        if os.getpid() != self._pid:
            return
        try:
            self.flush()
            self.release_all()
            self._remove_consumer()
        except Exception as error:
            # Their lease ends by itself, and another worker takes them.
            logger.warning("%d messages could not be given back at once: %s", len(self._held), error)
            self.leave()
            return
        self.end()

    def _remove_consumer(self) -> None:
        names = [name for queue in self.queues for name in (*self.keys.streams(queue), self.keys.wake(queue))]
        if names:
            scripts.run(self.client, "leave", names, [self.options.group, self.consumer])

    def end(self) -> None:
        """Nothing is left to keep."""
        self.orphans.discard(self)
        self._keeper.stop()
