"""Messages that the server holds until they are due: list them, cancel them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from celery_claim.streams import scripts
from celery_claim.streams.dead_letters import task_of
from celery_claim.streams.wire.keys import Keys

#: Tags that one step of the search for a task looks at.
SCANNED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Delayed:
    """One delayed message, without its body."""

    queue: str
    task: str | None
    task_id: str | None
    #: When it is due, in milliseconds by the server's clock.
    due_ms: int
    priority: int


def delayed(client: Any, keys: Keys, queue: str, *, limit: int) -> list[Delayed]:
    """The messages that are due next, at most `limit`."""
    listed = scripts.run(client, "delayed", [keys.due(queue), keys.delayed(queue)], [limit])
    return [
        Delayed(queue, *task_of(headers), int(float(due)), keys.steps[step - 1]) for _, due, step, headers in listed
    ]


def cancel(client: Any, keys: Keys, queue: str, task_id: str) -> int:
    """Take a task out before it is due; how many messages of it were there.

    The search goes over the tags in small steps, so that a million of them do not hold up the server.
    """
    escaped = re.sub(r"([\\*?\[\]^])", r"\\\1", task_id)
    found = {tag for tag, _ in client.zscan_iter(keys.due(queue), match=f"{escaped}/*", count=SCANNED_AT_ONCE)}
    tags = [tag for tag in found if tag.rpartition(b"/")[0].decode() == task_id]
    if not tags:
        return 0
    return int(scripts.run(client, "cancel", [keys.due(queue), keys.delayed(queue)], tags))
