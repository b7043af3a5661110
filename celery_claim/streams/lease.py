"""What one consumer holds: acknowledged in batches, renewed while it lives, given back when it lets go."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from celery_claim.streams import scripts
from celery_claim.streams.consumer_group import new_consumer_name
from celery_claim.streams.options import StreamOptions
from celery_claim.streams.wire.keys import Keys

logger = logging.getLogger("celery_claim.streams")

#: Seconds between two tries of the keeper when the server cannot be reached.
RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a message stands on the server."""

    queue: str
    stream: str
    id: str
    deliveries: int

    @property
    def tag(self) -> str:
        return f"{self.id}/{self.deliveries}/{self.stream}"


class Leases:
    """The messages of one consumer name. A thread of its own renews and flushes, also while a task blocks the process.

    After a connection loss the consumer is *left*: nothing more is read under its name, what is still worked on
    stays leased and can be acknowledged, and what the process dropped goes back to the queue.
    """

    #: Consumers of this process that still hold messages after their connection was lost.
    orphans: ClassVar[weakref.WeakSet[Leases]] = weakref.WeakSet()

    def __init__(self, client: Any, keys: Keys, options: StreamOptions, on_room: Callable[[], None]) -> None:
        self.client, self.keys, self.options = client, keys, options
        self.consumer = new_consumer_name()
        self.streams: set[str] = set()
        self._pid = os.getpid()
        self._on_room = on_room
        self._held: dict[str, Entry] = {}
        self._messages: dict[str, weakref.ref[Any]] = {}
        self._acked: dict[str, Entry] = {}
        self._oldest_ack = 0.0
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._left = self._ended = False
        self._keeper: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._held)

    # ---- hold and let go ------------------------------------------------------------------------------------

    def hold(self, entries: Iterable[Entry]) -> None:
        """Count entries as ours from the moment they were read."""
        with self._lock:
            for entry in entries:
                self._held[entry.tag] = entry
            if self._keeper is None and not self._ended:
                self._keeper = threading.Thread(target=self._keep, name="celery_claim-leases", daemon=True)
                self._keeper.start()

    def deliver(self, tag: str, message: Any) -> None:
        """Remember the message object: after a connection loss it tells whether anybody still works on it."""
        with self._lock:
            if tag in self._held:
                self._messages[tag] = weakref.ref(message)

    def ack(self, tag: str) -> None:
        """Acknowledge with the next batch."""
        with self._changed:
            entry = self._held.pop(tag, None)
            self._messages.pop(tag, None)
            if entry is None:
                return
            if not self._acked:
                self._oldest_ack = time.monotonic()
                self._changed.notify_all()
            self._acked[tag] = entry
            full = len(self._acked) >= self.options.ack_batch
        self._on_room()
        if full:
            self.flush_or_leave_it()

    def flush_or_leave_it(self) -> None:
        """Acknowledge now; without a server the batch is kept, and the keeper tries again."""
        try:
            self.flush()
        except Exception as error:
            logger.debug("acknowledgements are kept: %s", error)

    def flush(self) -> None:
        """Acknowledge what is finished; on an error nothing of it is forgotten."""
        if os.getpid() != self._pid:
            return
        with self._flushing:
            with self._lock:
                batch = dict(self._acked)
            if not batch:
                return
            self.client.register_script(scripts.text("settle"))(
                keys=[entry.stream for entry in batch.values()],
                args=[self.options.group, *(entry.id for entry in batch.values())],
            )
            with self._lock:
                for tag in batch:
                    self._acked.pop(tag, None)
                self._oldest_ack = time.monotonic()

    def release(self, tags: Iterable[str], *, counted: bool = False) -> None:
        """Give messages back to the queue: uncounted when they were never started."""
        with self._lock:
            entries = [entry for tag in tags if (entry := self._held.get(tag)) is not None]
        by_queue: dict[str, list[Entry]] = {}
        for entry in entries:
            by_queue.setdefault(entry.queue, []).append(entry)
        for queue, group in by_queue.items():
            self.client.register_script(scripts.text("release"))(
                keys=[self.keys.wake(queue), *(entry.stream for entry in group)],
                args=[self.options.group, self.consumer, "1" if counted else "0", *(entry.id for entry in group)],
            )
            with self._lock:
                for entry in group:
                    self._held.pop(entry.tag, None)
                    self._messages.pop(entry.tag, None)
        self._on_room()

    def bury(self, tag: str, reason: str) -> None:
        """Move a message to the dead letters of its queue."""
        with self._lock:
            entry = self._held.get(tag)
        if entry is None:
            return
        self.client.register_script(scripts.text("bury"))(
            keys=[entry.stream, self.keys.dead(entry.queue)],
            args=[self.options.group, self.consumer, entry.id, reason, self.options.dead_letter_maxlen],
        )
        with self._lock:
            self._held.pop(tag, None)
        self._on_room()

    # ---- the end --------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The connection is lost: keep what is worked on, and let the keeper give back what nobody refers to."""
        with self._changed:
            self._left = True
            if self._held or self._acked:
                self.orphans.add(self)
            self._changed.notify_all()

    def close(self) -> None:
        """An orderly end: acknowledge what is finished, give back the rest, remove the consumer's name."""
        if os.getpid() != self._pid:
            return
        try:
            self.flush()
            self.release(list(self._held))
            if self.streams:
                self.client.register_script(scripts.text("leave"))(
                    keys=sorted(self.streams), args=[self.options.group, self.consumer]
                )
        except Exception as error:
            # Their lease ends by itself, and another worker takes them.
            logger.warning("%d messages could not be given back at once: %s", len(self._held), error)
            self.leave()
            return
        self._end()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self.orphans.discard(self)
            self._changed.notify_all()

    # ---- the keeper -----------------------------------------------------------------------------------------

    def _keep(self) -> None:
        renew_at = time.monotonic() + self.options.renew_interval
        while True:
            with self._changed:
                if self._ended:
                    return
                now = time.monotonic()
                wake_at = min(renew_at, now + RETRY_SECONDS) if self._left else renew_at
                if self._acked:
                    wake_at = min(wake_at, self._oldest_ack + self.options.ack_delay)
                if wake_at > now:
                    self._changed.wait(wake_at - now)
                    continue
            try:
                self.flush()
                if self._left:
                    self._let_go_of_garbage()
                if time.monotonic() >= renew_at:
                    self._renew()
                    renew_at = time.monotonic() + self.options.renew_interval
                if self._left and not self._held and not self._acked:
                    self._end()
            except Exception as error:
                logger.debug("leases are tried again in %s s: %s", RETRY_SECONDS, error)
                time.sleep(RETRY_SECONDS)

    def _let_go_of_garbage(self) -> None:
        with self._lock:
            dropped = [tag for tag in self._held if (ref := self._messages.get(tag)) is None or ref() is None]
        if dropped:
            self.release(dropped)

    def _renew(self) -> None:
        with self._lock:
            held = dict(self._held)
            streams = sorted(self.streams)
        renew = self.client.register_script(scripts.text("renew"))
        if self._left:
            if not held:
                return
            names = [entry.stream for entry in held.values()]
            reply = renew(keys=names, args=[self.options.group, self.consumer, *(entry.id for entry in held.values())])
        else:
            # Everything that the server lists for us, also what is still unread in the socket.
            names = streams
            reply = renew(keys=names, args=[self.options.group, self.consumer])
        owned = {(names[index - 1], id_.decode()) for index, *ids in reply for id_ in ids}
        lost = [tag for tag, entry in held.items() if (entry.stream, entry.id) not in owned]
        with self._lock:
            lost = [tag for tag in lost if tag in self._held]
        for tag in lost:
            logger.warning(
                "the lease of message %s of queue %s was lost: another worker may run it", tag, held[tag].queue
            )
            self._forget_unstarted(tag)

    def _forget_unstarted(self, tag: str) -> None:
        """A lost message that the process dropped is no longer counted; one that runs still is, until it ends."""
        ref = self._messages.get(tag)
        if ref is not None and ref() is None:
            with self._lock:
                self._held.pop(tag, None)
                self._messages.pop(tag, None)
            self._on_room()
