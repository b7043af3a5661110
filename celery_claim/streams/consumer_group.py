"""The consumer group of a queue's streams: made when missing, at any time."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

from redis.exceptions import ResponseError

from celery_claim.streams import scripts
from celery_claim.streams.wire.keys import Keys

logger = logging.getLogger("celery_claim.streams")


def new_consumer_name() -> str:
    """A name for one connection of one process: what a lost reply held must not be renewed for ever."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:8]}"


def ensure_groups(
    client: Any, keys: Keys, group: str, queues: Iterable[str], expiring: Mapping[str, int] | None = None
) -> None:
    """Make streams and groups that do not exist, from the first message on: also those sent before any worker.

    `expiring`: queues that go away when nobody uses them -> milliseconds.
    """
    for queue in queues:
        names = (*keys.streams(queue), keys.wake(queue))
        scripts.run(client, "declare", names, [group, (expiring or {}).get(queue, 0)])


def announce(client: Any, keys: Keys, group: str, queues: Iterable[str], consumer: str) -> None:
    """List a consumer that waits: by themselves servers list it (Redis 7) with its first message only."""
    for queue in queues:
        try:
            client.execute_command("XGROUP", "CREATECONSUMER", keys.streams(queue)[0], group, consumer)
        except ResponseError as error:
            # A user who may not, or a server without memory: the consumer reads all the same.
            logger.debug("consumer %s of queue %s is not listed: %s", consumer, queue, error)


def group_is_missing(error: Exception) -> bool:
    """True for what servers answer to a read when FLUSHALL or an eviction took the stream or the group."""
    text = str(error)
    return "NOGROUP" in text or "UNBLOCKED" in text or "no longer exists" in text
