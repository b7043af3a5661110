"""Append messages to their queue, now or when they are due; broadcasts to their exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import uuid4

from celery_claim.streams import scripts
from celery_claim.streams.wire import codec
from celery_claim.streams.wire.keys import Keys

#: Where the script's arguments have the milliseconds until a message is due.
DELAY = 1


class QueueFull(Exception):
    """The queue holds `max_length` messages. This one was not published."""

    def __init__(self, queue: str) -> None:
        super().__init__(f"queue {queue!r} is full (max_length): the message was not published")
        self.queue = queue


class Write(NamedTuple):
    """One message on its way to the server: a plain command, or a run of the script `append`."""

    queue: str
    words: tuple[Any, ...]
    #: Whether `words` are the script's keys and arguments, as (keys, arguments), instead of a command.
    scripted: bool = False

    def command(self) -> tuple[Any, ...]:
        """The command for a pipeline; a script must have been loaded before."""
        if not self.scripted:
            return self.words
        keys, arguments = self.words
        return ("EVALSHA", scripts.digest("append"), len(keys), *keys, *arguments)

    def run(self, client: Any) -> None:
        """Publish. Nothing is repeated: a second XADD would be a second message."""
        if self.scripted:
            self.check(scripts.run(client, "append", *self.words))
        else:
            client.execute_command(*self.words)

    def check(self, reply: Any) -> None:
        """Raise QueueFull if that is what the server answered."""
        if reply in (b"full", "full"):
            raise QueueFull(self.queue)


def now(keys: Keys, queue: str, step: int, message: Mapping[str, Any]) -> Write:
    """For a queue without limits."""
    return Write(queue, ("XADD", keys.stream(queue, step), "*", *_words(message, queue)))


def with_limits(keys: Keys, queue: str, step: int, message: Mapping[str, Any], *, must_exist: bool) -> Write:
    """For a queue with a length or an end; one that had to exist and is gone takes nothing, which is no error."""
    return _scripted(keys, queue, step, message, must_exist=must_exist)


def when_due(keys: Keys, queue: str, step: int, message: Mapping[str, Any], *, seconds: float) -> Write:
    """Kept on the server until `seconds` from now by the server's clock."""
    return _scripted(keys, queue, step, message, delay=max(1, int(seconds * 1000)))


def to_all(keys: Keys, exchange: str, routing_key: str, message: Mapping[str, Any], *, maxlen: int) -> Write:
    """A broadcast."""
    words = (*_words(message, exchange), "rk", routing_key)
    return Write(exchange, ("XADD", keys.fanout(exchange), "MAXLEN", "~", maxlen, "*", *words))


def _scripted(
    keys: Keys, queue: str, step: int, message: Mapping[str, Any], *, must_exist: bool = False, delay: int = 0
) -> Write:
    names = [
        keys.meta(queue), keys.stream(queue, step), keys.due(queue), keys.delayed(queue), keys.wake(queue),
        *keys.streams(queue),
    ]  # fmt: skip
    # The task's id leads, so that a delayed task can be found and cancelled.
    tag = f"{(message.get('headers') or {}).get('id') or '-'}/{uuid4().hex}" if delay else ""
    arguments = [int(must_exist), delay, tag, keys.steps.index(step) + 1, *_words(message, queue)]
    return Write(queue, (names, arguments), scripted=True)


def _words(message: Mapping[str, Any], queue: str) -> list[bytes | str]:
    return [word for pair in codec.encode(message, queue).items() for word in pair]
