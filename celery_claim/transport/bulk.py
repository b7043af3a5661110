"""Publish one task for many items: Celery prepares the message once, and the items go out many to a round trip."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple
from uuid import uuid4

from celery import Task, signals
from celery.app.routes import MapRoute
from kombu import compression, serialization

from celery_claim.exceptions import BulkFailed
from celery_claim.streams.append import DELAY, Write
from celery_claim.transport.channel import Channel
from celery_claim.transport.publish import run_all

#: Stand in the prepared message where each item differs; no message has them by chance.
ID, ARGSREPR, KWARGSREPR = (f"{name}-{uuid4()}" for name in ("id", "args", "kwargs"))
#: Longest text of arguments that is sent along for monitors, as in Celery.
REPR_LENGTH = 1024


class Call(NamedTuple):
    """One item."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def bulk(task: Any, items: Iterable[Any], *, chunk: int = 1000, **options: Any) -> list[str]:
    """Send a task once for each item, and return the ids of the tasks in the order of the items.

    An item is a tuple or list of positional arguments, a dict of keyword arguments, or anything else as the only
    argument. `options` are those of ``apply_async`` and hold for all items: queue, priority, countdown, expires, ...;
    the route is looked up once. `chunk` items go out in one round trip.

    On other brokers, and where something wants to see each message (a receiver of before_task_publish,
    after_task_publish or task_sent, ``task_send_sent_event``, a route function, an ``apply_async`` of the task's own,
    eager mode), it is ``apply_async`` for each item, in a batch where kombu has one.

    Raises BulkFailed, which has the ids that were sent and those of which it is not known.
    """
    app = task.app
    # Not the proxy that stands for it until the app is finalized.
    task = app.tasks[task.name]
    calls = (_call(item) for item in items)
    with app.producer_or_acquire() as producer:
        channel = producer.channel
        if not isinstance(channel, Channel) or _is_watched(task):
            return _one_by_one(task, calls, producer, options)
        return _prepared(task, calls, producer, chunk, options)


def _call(item: Any) -> Call:
    if isinstance(item, (tuple, list)):
        return Call(tuple(item), {})
    if isinstance(item, Mapping):
        return Call((), item)
    return Call((item,), {})


def _is_watched(task: Any) -> bool:
    """Whether somebody would miss what `apply_async` does for each message."""
    app = task.app
    return bool(
        signals.before_task_publish.receivers
        or signals.after_task_publish.receivers
        or signals.task_sent.receivers
        or app.conf.task_send_sent_event
        or app.conf.task_always_eager
        or type(task).apply_async is not Task.apply_async
        or type(task).shadow_name is not Task.shadow_name
        or getattr(task, "_dump_pydantic_arguments", None) is not None
        or any(not isinstance(route, MapRoute) for route in app.amqp.routes)
    )


def _one_by_one(task: Any, calls: Iterator[Call], producer: Any, options: dict[str, Any]) -> list[str]:
    sent: list[str] = []
    try:
        for call in calls:
            sent.append(task.apply_async(call.args, dict(call.kwargs), producer=producer, **options).id)
    except Exception as error:
        raise BulkFailed(sent, []) from error
    return sent


def _prepared(task: Any, calls: Iterator[Call], producer: Any, chunk: int, options: dict[str, Any]) -> list[str]:
    sent: list[str] = []
    going: list[str] = []
    try:
        template = Template(task, producer, options)
        while some := list(islice(calls, chunk)):
            writes = []
            for call in some:
                if task.typing:
                    task.__header__(*call.args, **call.kwargs)
                writes.append(template.write(task_id := str(uuid4()), call))
                going.append(task_id)
            # Sent once: after an error nobody knows which of them arrived, and a second try could double them.
            run_all(producer.channel.client, writes)
            sent += going
            going = []
    except Exception as error:
        raise BulkFailed(sent, going) from error
    return sent


class Template:
    """A message as Celery prepared it; what differs between items is filled in."""

    def __init__(self, task: Any, producer: Any, options: dict[str, Any]) -> None:
        prepared: list[Write] = []
        channel = producer.channel
        # The first command on a pooled connection finds out whether the server has closed it meanwhile.
        producer.connection.ensure(producer, channel.client.ping, max_retries=1)()
        options = {"ignore_result": task.ignore_result, **task._get_exec_options(), **options}
        channel.collect = prepared.append
        try:
            task.app.send_task(
                task.name, (), {}, task_id=ID, argsrepr=ARGSREPR, kwargsrepr=KWARGSREPR, producer=producer,
                task_type=task, **options,
            )  # fmt: skip
        finally:
            channel.collect = None
        (self._write,) = prepared
        self._words = list(self._write.words[1] if self._write.scripted else self._write.words)
        self._body = self._words.index("body") + 1
        self._open = [at for at, word in enumerate(self._words) if isinstance(word, str) and ID in word]
        self._serializer = options.get("serializer") or task.app.conf.task_serializer
        self._compression = options.get("compression") or task.app.conf.task_compression
        content = self._words[self._body]
        if self._compression:
            content = compression.decompress(content, self._compression)
        content_type, encoding, _ = serialization.dumps(None, self._serializer)
        *_, self._embed = serialization.loads(content, content_type, encoding, accept=[content_type])
        self._made_at = time.monotonic()

    def write(self, task_id: str, call: Call) -> Write:
        """What publishes one item."""
        words = self._words.copy()
        # As they stand inside the quotes of a JSON string.
        args, kwargs = (json.dumps(repr(each)[:REPR_LENGTH])[1:-1] for each in call)
        for at in self._open:
            words[at] = words[at].replace(ID, task_id).replace(ARGSREPR, args).replace(KWARGSREPR, kwargs)
        body: Any
        _, _, body = serialization.dumps((call.args, call.kwargs, self._embed), self._serializer)
        if self._compression:
            body, _ = compression.compress(body, self._compression)
        words[self._body] = body
        if not self._write.scripted:
            return Write(self._write.queue, tuple(words))
        if words[DELAY]:
            # It was counted from when the message was prepared.
            words[DELAY] = max(1, words[DELAY] - int((time.monotonic() - self._made_at) * 1000))
        return Write(self._write.queue, (self._write.words[0], words), scripted=True)
