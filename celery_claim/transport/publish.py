"""Where a message goes: to queues, to be kept until it is due, or to everybody."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import Any

from kombu import exceptions
from redis.exceptions import ResponseError

from celery_claim.streams import append, scripts
from celery_claim.streams.append import Write

logger = logging.getLogger("celery_claim.streams")

#: kombu has batches, and an error for them, from 5.7 on.
BatchPublishError: type[Exception] = getattr(exceptions, "BatchPublishError", exceptions.OperationalError)


def seconds_until_due(message: dict[str, Any]) -> float:
    """Seconds from the publisher's now: the difference is right even when its clock is wrong."""
    eta = (message.get("headers") or {}).get("eta")
    if not eta:
        return 0
    try:
        due = eta if isinstance(eta, datetime) else datetime.fromisoformat(str(eta).replace("Z", "+00:00"))
    except ValueError:
        # The worker says so, with the task's name.
        return 0
    due = due if due.tzinfo else due.replace(tzinfo=timezone.utc)
    return (due - datetime.now(timezone.utc)).total_seconds()


def write_for(channel: Any, queue: str, message: dict[str, Any], *, must_exist: bool) -> Write:
    """What publishes one message to one queue."""
    options, keys = channel.options, channel.keys
    step = keys.step_of(channel._get_message_priority(message, reverse=options.priority_order == "amqp"))
    wait = seconds_until_due(message)
    if wait >= options.delayed_min and options.delayed_delivery:
        headers = dict(message["headers"])
        # Moved away, so that no worker's clock delays the message a second time.
        headers["x-eta"] = headers.pop("eta")
        return append.when_due(keys, queue, step, {**message, "headers": headers}, seconds=wait)
    if must_exist or channel.routes.has_limits(queue):
        return append.with_limits(keys, queue, step, message, must_exist=must_exist)
    return append.now(keys, queue, step, message)


def broadcast(client: Any, write: Write) -> None:
    """Publish to everybody; events and remote control must not end a worker that could still empty a full server."""
    try:
        write.run(client)
    except ResponseError as error:
        if "OOM" not in str(error):
            raise
        logger.warning("a broadcast to %s was not sent: %s", write.queue, error)


class PublishBatch:
    """What `kombu.Producer.batch()` collects: one round trip for many messages, and no promise of all or nothing."""

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel, self.max_size = channel, max_size
        self._writes: list[Write] = []
        self._failed: Exception | None = None
        self._over = ""

    def publish(self, message: Any, **kwargs: Any) -> Any:
        """Route one message; it leaves when the batch is full or flushed."""
        self._check_usable()
        result = self.channel.basic_publish(message, batch=self._writes.append, **kwargs)
        if len(self._writes) >= self.max_size:
            self.flush()
        return result

    def flush(self) -> None:
        """Send what was collected. Nothing is repeated: after an error it is not known which messages arrived.

        Raises BatchPublishError, from QueueFull when a queue took no more.
        """
        self._check_usable()
        writes, self._writes = self._writes, []
        if not writes:
            return
        try:
            run_all(self.channel.client, writes)
        except Exception as error:
            self._failed = error
            raise BatchPublishError(f"some messages of a batch of {len(writes)} may not have been published") from error

    def discard(self) -> None:
        """Forget what was not sent."""
        self._over = self._over or "aborted"
        self._writes.clear()

    def close(self) -> None:
        self._over = "closed"

    def _check_usable(self) -> None:
        if self._over:
            raise RuntimeError(f"this batch is {self._over}")
        if self._failed is not None:
            raise BatchPublishError("this batch failed before; publish with a new one") from self._failed


def run_all(client: Any, writes: list[Write]) -> None:
    """Publish in one round trip; the first error is raised after all were tried."""
    with client.pipeline(transaction=False) as pipe:
        if any(write.scripted for write in writes):
            pipe.execute_command("SCRIPT LOAD", scripts.text("append"))
        for write in writes:
            pipe.execute_command(*write.command())
        replies = pipe.execute(raise_on_error=False)[-len(writes) :]
    for write, reply in zip(writes, replies, strict=True):
        if isinstance(reply, Exception):
            raise reply
        write.check(reply)
