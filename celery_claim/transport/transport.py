"""The kombu transport: wakes the worker's event loop when a channel has something to deliver."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import Any

import redis
from kombu.transport import virtual
from redis import exceptions

from celery_claim.streams.append import QueueFull
from celery_claim.streams.broadcast import positions_on
from celery_claim.streams.options import read_options
from celery_claim.streams.routes import Routes
from celery_claim.streams.wire.keys import Keys
from celery_claim.transport.channel import Channel
from celery_claim.transport.connect import check_urls, connect
from celery_claim.transport.faults import PASSING
from celery_claim.transport.refuse import check_server

logger = logging.getLogger("celery_claim.streams")


class Transport(virtual.Transport):
    """`redis-streams://`, `rediss-streams://`, `sentinel-streams://` and `redis-streams+socket://`."""

    #: kombu's own types leave these open.
    channels: Any
    _callbacks: Any
    _avail_channels: Any

    Channel = Channel
    default_port = 6379
    polling_interval = None
    # Celery decides by this name whether broadcasts, gossip and --disable-prefetch work.
    driver_type = "redis"
    driver_name = "redis-streams"
    connection_errors = (*virtual.Transport.connection_errors, *PASSING, OSError)
    channel_errors = (*virtual.Transport.channel_errors, exceptions.ResponseError, exceptions.DataError, QueueFull)
    # Told apart for kombu: without these names it would repeat every error, also what will never succeed.
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = virtual.Transport.channel_errors
    implements = virtual.Transport.implements.extend(
        asynchronous=True, batch_publish=True, exchange_type=frozenset({"direct", "topic", "fanout"})
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        check_urls(client)
        self.options = read_options(client.transport_options)
        self.keys = Keys(self.options.global_keyprefix, self.options.priority_steps)
        self.commands = self.open()
        self.positions = positions_on(f"{client.hostname}:{client.port}/{client.virtual_host}")
        self.routes = Routes(self.commands, self.keys, self.options)
        self._ready = threading.Event()
        self._ears: tuple[socket.socket, socket.socket] | None = None
        self._pid = os.getpid()
        self._turn = 0

    def driver_version(self) -> str:
        return str(redis.__version__)

    def open(self, *, single: bool = False) -> Any:
        """A client; a `single` one is for blocking reads, and notices a server that no longer answers."""
        return connect(self.client, single=single, timeout=self._watchdog if single else None)

    @property
    def _watchdog(self) -> float:
        """Seconds after which a read that was not answered counts as a lost connection."""
        return self.options.block_timeout + self.options.health_check_interval

    def establish_connection(self) -> Any:
        self._check_server()
        return super().establish_connection()

    def _check_server(self) -> None:
        check_server(self.commands, self.client, self.keys)

    # ---- deliver --------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """A channel has something to deliver; called by its threads."""
        self._ready.set()
        if self._ears is not None:
            try:
                self._ears[1].send(b"x")
            except OSError:
                # The pipe is full, so the loop wakes anyway; or closed, so nobody listens.
                return

    def deliver_one(self) -> bool:
        """Deliver one message of one channel, each channel in its turn."""
        channels = self.channels
        for offset in range(len(channels)):
            channel = channels[(self._turn + offset) % len(channels)]
            if not channel.closed and channel.deliver_one():
                self._turn += offset + 1
                return True
        return False

    def drain_events(  # type: ignore[override]
        self, connection: Any, timeout: float | None = None
    ) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._ready.clear()
            if self.deliver_one():
                return
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._ready.wait(1.0 if left is None else min(left, 1.0))

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        if self._ears is None:
            self._ears = socket.socketpair()
            for ear in self._ears:
                ear.setblocking(False)
        loop.add_reader(self._ears[0].fileno(), self.on_readable)
        self.wake()

    def on_readable(self) -> None:  # type: ignore[override]
        """Deliver one message per turn of the loop, so that acknowledgements come in between.

        The byte that woke the loop stays in the pipe while there is more: the loop comes again by itself.
        """
        if self.deliver_one():
            return
        assert self._ears is not None
        try:
            self._ears[0].recv(4096)
        except BlockingIOError:
            return
        # What a thread added before its byte was taken away has nobody else to tell of it.
        if self.deliver_one():
            self._ears[1].send(b"x")

    # ---- the end --------------------------------------------------------------------------------------------

    def _collect(self, connection: Any) -> None:
        """The connection was lost (or the process forked): nothing is given back that is still worked on."""
        channels = {*self.channels, *self._avail_channels}
        self.channels.clear()
        self._avail_channels.clear()
        for channel in channels:
            channel.abandon()
        self._close_ears()

    def close_connection(self, connection: Any) -> None:
        super().close_connection(connection)
        self._close_ears()
        if not any(channel.leases in channel.leases.orphans for channel in self.channels):
            self.commands.close()

    def _close_ears(self) -> None:
        ears, self._ears = self._ears, None
        for ear in ears or ():
            ear.close()

    @property
    def default_connection_params(self) -> dict[str, Any]:
        return {"port": self.default_port, "hostname": "localhost", "virtual_host": "0"}
