"""Read messages of a consumer group: as many as there is room for, then wait for the next one."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from celery_claim.streams import scripts
from celery_claim.streams.consumer_group import ensure_groups, group_is_missing
from celery_claim.streams.lease import Entry, Leases
from celery_claim.streams.options import StreamOptions
from celery_claim.streams.wire.keys import Keys

logger = logging.getLogger("celery_claim.streams")

#: Seconds after which a consumer without room looks again, should nobody have told it.
LOOK_AGAIN_SECONDS = 0.05


class Reader(threading.Thread):
    """Reads the queues of one channel into a buffer and calls `on_ready`; an error ends it and is kept in `error`."""

    def __init__(
        self,
        client: Any,
        keys: Keys,
        options: StreamOptions,
        leases: Leases,
        *,
        room: Callable[[], int],
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(name="celery_claim-reader", daemon=True)
        self.client, self.keys, self.options, self.leases = client, keys, options, leases
        self.buffer: deque[tuple[Entry, dict[bytes, bytes]]] = deque()
        self.error: Exception | None = None
        self._room, self._on_ready = room, on_ready
        self._queues: tuple[str, ...] = ()
        self._turn = 0
        self._wake = threading.Event()
        self._stopping = False
        self._client_id: int | None = None
        self._recover_at = time.monotonic() + options.recovery_grace

    def consume(self, queues: tuple[str, ...]) -> None:
        """Read these queues from now on."""
        ensure_groups(self.leases.client, self.keys, self.options.group, set(queues) - set(self._queues))
        self._queues = queues
        self.leases.streams.update(stream for queue in queues for stream in self.keys.streams(queue))
        self.unblock()

    def poke(self) -> None:
        """There may be room again."""
        self._wake.set()

    def unblock(self) -> None:
        """End a waiting read early; where the server does not allow it, it ends by itself."""
        self._wake.set()
        if self._client_id is not None and self.is_alive():
            try:
                self.leases.client.execute_command("CLIENT", "UNBLOCK", self._client_id)
            except Exception as error:
                logger.debug("a waiting read ends by itself: %s", error)

    def stop(self) -> None:
        """Read no more; what the server hands out meanwhile is given back by the leases' end."""
        self._stopping = True
        self.unblock()
        if self is not threading.current_thread():
            self.join(self.options.block_timeout + 1)

    def abandon(self) -> None:
        """The connection is lost: end as soon as possible, without talking to the server."""
        self._stopping = True
        self._wake.set()
        self.client.connection_pool.disconnect()

    def run(self) -> None:
        try:
            try:
                self._client_id = self.client.execute_command("CLIENT", "ID")
            except Exception as error:
                logger.debug("reads cannot be ended early: %s", error)
            while not self._stopping:
                self._read_once()
        except Exception as error:
            if not self._stopping:
                self.error = error
                self._on_ready()
        finally:
            self.client.close()

    def _read_once(self) -> None:
        self._wake.clear()
        queues = self._queues
        room = min(self._room(), self.options.fetch_batch) if queues else 0
        if room <= 0:
            self._wake.wait(LOOK_AGAIN_SECONDS if queues else self.options.block_timeout)
            return
        try:
            next_due, entries = self.fetch(queues, room)
            if not entries and not self._stopping:
                self.leases.flush_or_leave_it()
                wait = self.options.block_timeout if next_due < 0 else min(self.options.block_timeout, next_due)
                if recovering := self._recover_at - time.monotonic():
                    wait = min(wait, max(recovering, 0.001))
                entries = self._wait(queues, wait)
        except Exception as error:
            if not group_is_missing(error):
                raise
            ensure_groups(self.client, self.keys, self.options.group, queues)
            return
        if entries:
            self._hand_over(entries, room)

    def fetch(self, queues: tuple[str, ...], room: int) -> tuple[float, list[tuple[Entry, dict[bytes, bytes]]]]:
        """Up to `room` messages without waiting, and the seconds until the next delayed one (-1: there is none)."""
        self._turn += 1
        turn = self._turn % len(queues)
        queues = queues[turn:] + queues[:turn]
        names, owners = [], []
        for queue in queues:
            of_queue = [
                *self.keys.streams(queue), self.keys.due(queue), self.keys.delayed(queue), self.keys.dead(queue)
            ]  # fmt: skip
            names += of_queue
            owners += [queue] * len(of_queue)
        now = time.monotonic()
        recover = now >= self._recover_at
        options = self.options
        next_due, taken, dead = self.client.register_script(scripts.text("fetch"))(
            keys=names,
            args=[
                options.group, self.leases.consumer, room, int(options.lease_timeout * 1000), int(recover),
                options.delivery_limit, options.dead_letter_maxlen, int(options.requeue_backoff_max * 1000),
                len(self.keys.steps), options.delayed_batch,
            ],
        )  # fmt: skip
        if recover:
            # Jitter only shortens: the promise is an upper bound.
            self._recover_at = now + options.lease_timeout / 4 * random.uniform(0.8, 1)
        for index, id_, count, _ in dead:
            logger.error(
                "message %s of queue %s is a dead letter after %d deliveries", id_.decode(), owners[index - 1], count
            )
        entries = [
            (Entry(owners[index - 1], names[index - 1], id_.decode(), count), dict(zip(f[::2], f[1::2], strict=True)))
            for index, id_, count, f in taken
        ]
        return next_due / 1000 if next_due >= 0 else -1, entries

    def _wait(self, queues: tuple[str, ...], seconds: float) -> list[tuple[Entry, dict[bytes, bytes]]]:
        streams = {stream: queue for queue in queues for stream in self.keys.streams(queue)}
        wakes = [self.keys.wake(queue) for queue in queues]
        names = [*streams, *wakes]
        if self._wake.is_set():
            return []
        reply = self.client.execute_command(
            "XREADGROUP", "GROUP", self.options.group, self.leases.consumer, "COUNT", 1,
            "BLOCK", max(1, int(seconds * 1000)), "STREAMS", *names, *(">" for _ in names),
        )  # fmt: skip
        return list(self._parse(reply or [], streams))

    def _parse(self, reply: Any, streams: dict[str, str]) -> Iterator[tuple[Entry, dict[bytes, bytes]]]:
        for name, entries in reply:
            stream = name.decode()
            for id_, fields in entries:
                if stream in streams:
                    yield Entry(streams[stream], stream, id_.decode(), 1), fields
                else:
                    self.client.register_script(scripts.text("settle"))(
                        keys=[stream], args=[self.options.group, id_.decode()]
                    )

    def _hand_over(self, entries: list[tuple[Entry, dict[bytes, bytes]]], room: int) -> None:
        self.leases.hold(entry for entry, _ in entries)
        # One blocked read may return a message of every stream, which is more than there is room for.
        wanted, excess = entries[:room], entries[room:]
        if excess:
            self.leases.release([entry.tag for entry, _ in excess])
        self.buffer.extend(wanted)
        self._on_ready()
