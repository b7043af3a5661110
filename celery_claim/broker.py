"""Producers for what celery_claim itself sends: they wait for the broker for a bounded time.

A beat that waits for a broker which has stopped answering fires no windows meanwhile, and a worker's maintenance
recovers no rows. Most transports wait for ever, so ours go over connections of their own; those of the app, which send
what the user's code sends, stay as the user set them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from kombu import pools

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Connection

T = TypeVar("T")

#: Seconds between two tries to reach a broker that did not take a message.
RETRY_SECONDS = 1.0
#: Seconds to wait for an answer when broker_connection_timeout is None; Celery's own default of that.
ANSWER_SECONDS = 4.0
#: Seconds of silence after which Redis is asked for a sign of life first: before nearly every message. A message that
#: got no answer may have arrived, and is sent again; a question that got none has cost nothing.
SILENCE_SECONDS = 0.1

#: The transport options that bound a wait, by driver type and name; None stands for the seconds.
#: https://docs.celeryq.dev/projects/kombu/en/stable/reference/kombu.transport.redis.html#transport-options
#: https://docs.celeryq.dev/projects/amqp/en/latest/reference/amqp.connection.html
_REDIS = {"socket_timeout": None, "socket_connect_timeout": None, "health_check_interval": SILENCE_SECONDS}
_BOUNDS: dict[tuple[str, str], dict[str, float | None]] = {
    ("redis", "redis"): _REDIS,
    ("redis", "redis-streams"): _REDIS,
    ("amqp", "py-amqp"): {"read_timeout": None, "write_timeout": None},
}


class Broker:
    """The broker of one app, as those see it who must not wait for it."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        #: When it is to be tried again, in time.monotonic().
        self.rests_until = 0.0

    @cached_property
    def _connection(self) -> Connection:
        # Never made: it only tells the pool what its connections are like, also that of a forked child.
        return self.connection()

    def connection(self) -> Connection:
        """A new connection, not yet made, that waits at most broker_connection_timeout for each answer.

        What broker_transport_options says stays as it is. Other transports than those of Redis and py-amqp wait as long
        as they do anyway.
        """
        app = self._app
        connection: Any = app.connection_for_write()
        transport = connection.get_transport_cls()
        seconds = app.conf.broker_connection_timeout or ANSWER_SECONDS
        missing = {
            name: seconds if value is None else value
            for name, value in _BOUNDS.get((transport.driver_type, transport.driver_name), {}).items()
            if name not in connection.transport_options
        }
        return app.connection_for_write(transport_options=missing) if missing else connection

    def producer(self) -> Any:
        """A producer for a `with` block, on a pooled connection of this kind."""
        # The app's own pool says how large pools are, and forgets them in a forked child.
        assert self._app.pool is not None
        pool = pools.producers[self._connection]
        return pool.acquire(block=True, timeout=self._app.conf.broker_pool_acquire_timeout)

    def attempt(self, send: Callable[[], T], *, anew: bool) -> T:
        """What `send` returns; called a second time when the first found at once that the connection was closed.

        `anew`: whether the last attempt worked. The first message after a pause often finds that the broker, or
        something on the way, has closed the connection.
        """
        began = time.monotonic()
        try:
            return send()
        except Exception as error:  # every broker has errors of its own
            if not anew or not self.is_away(error) or time.monotonic() - began > RETRY_SECONDS:
                raise
        return send()

    def is_away(self, error: BaseException) -> bool:
        """Whether an error of sending tells that the broker cannot be reached or does not answer.

        Else it refuses only this message, or nobody could have sent it.
        """
        transport: Any = self._connection.get_transport_cls()
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, (OSError, *transport.connection_errors)):
                return True
            cause = cause.__cause__ or cause.__context__
        return False

    def rest(self, began: float) -> None:
        """After a try that began then and failed, leave it alone for as long as that took.

        So whoever tries has half of the time for other things, however long the broker takes to say nothing.
        """
        now = time.monotonic()
        self.rests_until = now + max(RETRY_SECONDS, now - began)

    @property
    def rests(self) -> bool:
        """Whether it did not answer just now."""
        return time.monotonic() < self.rests_until


@contextmanager
def batched(producer: Any) -> Iterator[None]:
    """Messages sent in the block go out together, where this kombu and its transport can."""
    batch = getattr(producer, "batch", None)
    if batch is None or not getattr(producer, "supports_batch_publish", False):
        yield
        return
    with batch():
        yield
