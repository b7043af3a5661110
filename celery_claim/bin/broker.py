"""The broker that a command is about: reached without any worker, its errors in the words of who runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from celery_claim.bin import WrongUsage
from celery_claim.exceptions import BrokerUnavailable, ConfigurationError, did_you_mean


@dataclass(frozen=True)
class Broker:
    """An open connection to a Redis Streams broker."""

    #: Without its password.
    url: str
    connection: Any
    client: Any
    keys: Any
    options: Any

    def known_queues(self, app: Any) -> list[str]:
        """The queues that were declared on the server or are configured in the app."""
        from celery_claim.streams.look import known_queues

        return sorted({*known_queues(self.client, self.keys), *app.amqp.queues})

    def require_queue(self, app: Any, name: str) -> None:
        """Raises WrongUsage, with the closest name, when nobody ever used such a queue."""
        known = self.known_queues(app)
        try:
            keys = [*self.keys.of_queue(name), self.keys.dead(name)]
        except ValueError as error:
            raise WrongUsage(str(error)) from error
        if name not in known and not self.client.exists(*keys):
            raise WrongUsage(f"no queue is called {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")


@contextmanager
def broker_of(ctx: click.Context) -> Iterator[Broker]:
    """The app's broker.

    Raises WrongUsage when it is not ours, BrokerUnavailable when it cannot be reached or refuses us.
    """
    from redis.exceptions import RedisError

    from celery_claim.transport import Transport

    app = ctx.obj.app
    with app.connection_for_write() as connection:
        url = connection.as_uri()
        if not issubclass(connection.get_transport_cls(), Transport):
            raise WrongUsage(
                f"the broker is {url}, and this command is about the queues of a redis-streams:// broker; give its URL "
                "with -b, or set broker_url of the app"
            )
        try:
            # Not connection.connect(), which tries again for as long as a worker would.
            transport = connection.transport
            try:
                transport.establish_connection()
            except ConfigurationError as error:
                # Its password, its permissions, its kind: to whom looks on, a broker that cannot be used.
                raise BrokerUnavailable(str(error)) from error
            yield Broker(url, connection, transport.commands, transport.keys, transport.options)
        except (RedisError, OSError) as error:
            raise BrokerUnavailable(f"{url}: {error}") from error
