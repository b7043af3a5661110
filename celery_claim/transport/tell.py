"""What the flow of messages reports, as log lines and signals: never with a message's arguments."""

from __future__ import annotations

import logging

from celery_claim import signals
from celery_claim.streams.dead_letters import Death
from celery_claim.streams.lease import Entry
from celery_claim.streams.read import Read

logger = logging.getLogger("celery_claim.streams")


def of_death(read: Read, reason: str) -> None:
    """A message went to the dead letters."""
    entry = read.entry
    death = Death(entry.queue, entry.id, reason, entry.deliveries, read.fields)
    logger.error(
        "message %s of queue %s is a dead letter (%s) after %d deliveries: task %s[%s]; see: celery claim dead %s",
        death.message_id,
        death.queue,
        death.reason,
        death.deliveries,
        death.task,
        death.task_id,
        death.queue,
    )
    signals.message_dead.send(sender=death.queue, death=death)


def of_lost_lease(entry: Entry) -> None:
    """Another worker may have a message that is still worked on here."""
    signals.lease_lost.send(sender=entry.queue, queue=entry.queue, tag=entry.tag)
