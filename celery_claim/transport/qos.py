"""How many messages a channel may hold, and what becomes of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kombu.transport import virtual

from celery_claim.streams.lease import Leases
from celery_claim.streams.read import Room

if TYPE_CHECKING:
    from celery_claim.transport.channel import Channel


class QoS(virtual.QoS):
    """Counts what the leases hold: they outlive the channel, and so does the right to acknowledge."""

    channel: Any
    restore_at_shutdown = False

    def __init__(self, channel: Channel, prefetch_count: int = 0) -> None:
        # The parent would register a finalizer that puts messages back when the process ends.
        self.channel = channel
        self.prefetch_count = prefetch_count or 0

    def append(self, message: Any, delivery_tag: str) -> None:
        self.channel.leases.deliver(delivery_tag, message)

    def can_consume(self) -> bool:
        return self.can_consume_max_estimate() > 0

    def can_consume_max_estimate(self) -> int:
        if not self.prefetch_count:
            return int(self.channel.options.fetch_batch)
        # Messages of a lost connection that are still worked on take their place in the prefetch.
        inherited = sum(len(leases) for leases in list(Leases.orphans)) if Leases.orphans else 0
        return max(0, self.prefetch_count - len(self.channel.leases) - inherited)

    def room(self, *, unread: int, delivering: bool) -> Room:
        """What the reader may take, with `unread` messages read and not yet delivered."""
        if "can_consume" in vars(self):
            # `celery worker --disable-prefetch` replaces it: one message, and only when a process is free.
            return Room(int(not unread and not delivering and bool(self.can_consume())), 1)
        if not self.prefetch_count:
            whole = int(self.channel.options.fetch_batch)
            return Room(max(0, whole - unread), whole)
        return Room(self.can_consume_max_estimate(), self.prefetch_count)

    def ack(self, delivery_tag: str) -> None:
        self.channel.leases.ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if requeue:
            self.channel.leases.release([delivery_tag], counted=True)
        else:
            self.channel.bury(delivery_tag, "rejected")

    def restore_unacked(self) -> None:
        """Give back what this channel holds."""
        self.channel.leases.release_all()

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Nothing: closing the channel gives messages back."""
