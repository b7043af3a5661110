"""Append messages to their queue, now or when they are due."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from celery_claim.streams import scripts
from celery_claim.streams.wire import codec
from celery_claim.streams.wire.keys import Keys


class QueueFull(Exception):
    """The queue holds `max_length` messages. This one was not published."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"queue {queue!r} is full (max_length): the message was not published")
        self.queue = queue


def append(client: Any, keys: Keys, queue: str, step: int, message: Mapping[str, Any], *, expires: bool = False) -> str:
    """Publish a message and return its id, or ``gone`` when an expiring queue is no longer there."""
    words = [word for pair in codec.encode(message).items() for word in pair]
    stream = keys.stream(queue, step)
    names = [stream, keys.meta(queue), *(key for key in keys.of_queue(queue) if key not in (stream, keys.meta(queue)))]
    reply: str = client.register_script(scripts.text("append"))(keys=names, args=["1" if expires else "0", *words])
    reply = reply.decode() if isinstance(reply, bytes) else reply
    if reply == "full":
        raise QueueFull(queue)
    return reply


def delay(client: Any, keys: Keys, queue: str, step: int, message: Mapping[str, Any], *, seconds: float) -> None:
    """Keep a message on the server until `seconds` from now by the server's clock."""
    words = [word for pair in codec.encode(message).items() for word in pair]
    tag = f"{(message.get('headers') or {}).get('id') or '-'}/{uuid4().hex}"
    client.register_script(scripts.text("delay"))(
        keys=[keys.due(queue), keys.delayed(queue), keys.wake(queue)],
        args=[tag, int(seconds * 1000), keys.steps.index(step) + 1, *words],
    )
