"""What stands in the queues, read off the server alone: no worker is asked, no message is changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError

from celery_claim.streams import scripts
from celery_claim.streams.wire.keys import Keys

#: Pending entries per stream that are looked at for the one that was silent longest.
PENDING_LOOKED_AT = 1000


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """One queue at one moment."""

    queue: str
    #: Messages that wait for a worker, and those that workers hold.
    ready: int
    pending: int
    #: Messages that are not due yet, and dead letters.
    delayed: int
    dead: int
    #: Connections that read the queue now.
    consumers: int
    #: Milliseconds since the most silent owner of a message renewed its lease; more than the lease is a dead owner.
    oldest_idle_ms: int | None
    #: Milliseconds that the oldest ready message has waited.
    oldest_ready_ms: int | None
    #: Milliseconds until the next delayed message is due.
    next_due_ms: int | None
    #: When a message was last delivered for the first time, in milliseconds by the server's clock.
    last_delivered_ms: int | None


def known_queues(client: Any, keys: Keys) -> list[str]:
    """The queues that were declared on this server, in alphabetical order."""
    return sorted(name.decode() for name in client.smembers(keys.queues))


def look(client: Any, keys: Keys, group: str, queues: Iterable[str]) -> list[QueueFacts]:
    """The facts of some queues in one round trip, whatever their length."""
    queues = list(queues)
    if not queues:
        return []
    script = client.register_script(scripts.text("look"))
    with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            names = [*keys.streams(queue), keys.due(queue), keys.dead(queue)]
            script(keys=names, args=[group, PENDING_LOOKED_AT], client=pipe)
        answers = pipe.execute()
    connected = _connected(client)
    return [_facts(queue, answer, connected) for queue, answer in zip(queues, answers, strict=True)]


def _connected(client: Any) -> set[str] | None:
    """The names of the connections to the server; None where the user may not ask for them."""
    try:
        return {each["name"] for each in client.client_list()}
    except NoPermissionError:
        return None


def _facts(queue: str, answer: list[Any], connected: set[str] | None) -> QueueFacts:
    ready, pending, delayed, dead, silent, waited, next_due, delivered, names = answer
    consumers = {name.decode() for name in names}
    if connected is not None:
        # A killed worker's name stays listed, and a server's idea of how long a consumer is idle is not its liveness
        # (before Redis 7.2 only reads that return something count).
        consumers &= connected
    return QueueFacts(
        queue=queue,
        ready=ready,
        pending=pending,
        delayed=delayed,
        dead=dead,
        consumers=len(consumers),
        oldest_idle_ms=_or_none(silent),
        oldest_ready_ms=_or_none(waited),
        next_due_ms=_or_none(next_due),
        last_delivered_ms=delivered or None,
    )


def _or_none(milliseconds: int) -> int | None:
    return None if milliseconds < 0 else milliseconds
