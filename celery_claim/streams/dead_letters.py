"""Messages that went to the dead letters of their queue: list them, put them back, drop them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_claim.streams import scripts
from celery_claim.streams.wire.keys import Keys

#: Letters that one round trip lists, puts back or drops.
BATCH = 100


#: Reasons that others ask about.
DELIVERY_LIMIT, REJECTED, UNKNOWN_TASK = "delivery limit", "rejected", "unknown task"


@dataclass(frozen=True, slots=True)
class Death:
    """A message that went to the dead letters just now."""

    queue: str
    #: The id that it had in its stream.
    message_id: str
    reason: str
    deliveries: int
    #: As they were published.
    fields: Mapping[bytes, bytes]

    @property
    def task(self) -> str | None:
        return task_of(self.fields.get(b"headers"))[0]

    @property
    def task_id(self) -> str | None:
        return task_of(self.fields.get(b"headers"))[1]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter as the server has it, without its body."""

    queue: str
    id: str
    reason: str
    deliveries: int
    #: When it died, in milliseconds by the server's clock.
    at_ms: int
    #: The id that the message had in its stream.
    message_id: str
    task: str | None
    task_id: str | None
    priority: int
    body_bytes: int


def task_of(headers: Any) -> tuple[str | None, str | None]:
    """Name and id of the task of a message, from its headers' JSON; None for what is not there or is no text."""
    try:
        found = json.loads(headers or b"{}")
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(found, Mapping):
        return None, None
    name, id_ = found.get("task"), found.get("id")
    return name if isinstance(name, str) else None, id_ if isinstance(id_, str) else None


def letters(client: Any, keys: Keys, queue: str, *, limit: int | None = None) -> Iterator[DeadLetter]:
    """The dead letters that are there now, the oldest first, read batch by batch; at most `limit`."""
    last = _last_id(client, keys, queue)
    start = "-"
    while last and (limit is None or limit > 0):
        count = BATCH if limit is None else min(BATCH, limit)
        batch = _list(client, keys, queue, start, last, count)
        yield from batch
        if len(batch) < count:
            return
        start = f"({batch[-1].id}"
        limit = None if limit is None else limit - len(batch)


def named(client: Any, keys: Keys, queue: str, ids: Sequence[str]) -> list[DeadLetter]:
    """The letters of these ids; those that are not there are left out."""
    return [letter for id_ in ids for letter in _list(client, keys, queue, id_, id_, 1)]


def replay(client: Any, keys: Keys, queue: str, chosen: Iterable[DeadLetter]) -> Iterator[DeadLetter]:
    """Put letters back at the end of their queue, their deliveries counted from zero; yields those that were."""
    streams = keys.streams(queue)
    for batch in _batches(chosen):
        steps = [streams.index(keys.stream(queue, keys.step_of(letter.priority))) + 1 for letter in batch]
        words = [word for letter, step in zip(batch, steps, strict=True) for word in (letter.id, step)]
        done = {id_.decode() for id_ in scripts.run(client, "replay", [keys.dead(queue), *streams], words)}
        yield from (letter for letter in batch if letter.id in done)


def drop(client: Any, keys: Keys, queue: str, chosen: Iterable[DeadLetter]) -> Iterator[DeadLetter]:
    """Delete letters for good; yields those that were still there."""
    for batch in _batches(chosen):
        with client.pipeline(transaction=False) as pipe:
            for letter in batch:
                pipe.xdel(keys.dead(queue), letter.id)
            deleted = pipe.execute()
        yield from (letter for letter, count in zip(batch, deleted, strict=True) if count)


def message_of(client: Any, keys: Keys, letter: DeadLetter) -> dict[bytes, bytes]:
    """The fields of the message as it was published; empty when the letter is gone."""
    entries = client.execute_command("XRANGE", keys.dead(letter.queue), letter.id, letter.id)
    words = entries[0][1] if entries else []
    pairs = list(words.items()) if isinstance(words, dict) else list(zip(words[::2], words[1::2], strict=True))
    return dict(pairs[4:])


def _last_id(client: Any, keys: Keys, queue: str) -> str | None:
    newest = client.execute_command("XREVRANGE", keys.dead(queue), "+", "-", "COUNT", 1)
    return newest[0][0].decode() if newest else None


def _list(client: Any, keys: Keys, queue: str, first: str, last: str, count: int) -> list[DeadLetter]:
    listed = scripts.run(client, "dead", [keys.dead(queue)], [first, last, count])
    return [_letter(queue, *each) for each in listed]


def _letter(queue: str, id_: bytes, body_bytes: int, words: list[bytes]) -> DeadLetter:
    noted = {name.decode(): value for name, value in zip(words[0:8:2], words[1:8:2], strict=True)}
    message = dict(zip(words[8::2], words[9::2], strict=True))
    task, task_id = task_of(message.get(b"headers"))
    return DeadLetter(
        queue=queue,
        id=id_.decode(),
        reason=noted["reason"].decode(errors="replace"),
        deliveries=int(noted["n"]),
        at_ms=int(noted["at"]),
        message_id=noted["id"].decode(),
        task=task,
        task_id=task_id,
        priority=_priority(message.get(b"properties")),
        body_bytes=body_bytes,
    )


def _priority(properties: bytes | None) -> int:
    try:
        found = json.loads(properties or b"{}")
        return int(found["priority"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0


def _batches(chosen: Iterable[DeadLetter]) -> Iterator[list[DeadLetter]]:
    batch: list[DeadLetter] = []
    for letter in chosen:
        batch.append(letter)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
