"""What a worker knows of itself: who it is, and whether it takes runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery_claim.app import state_of
from celery_claim.nodes.identity import Identity

if TYPE_CHECKING:
    from celery import Celery


class Standing:
    """What one worker knows of itself, shared by its steps, its threads and, by fork, its pool."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.accepting = False
        #: Another start took our name: this one is over, whatever its parts still do.
        self.superseded = False
        self.broker_id: str | None = None
        self.queues: tuple[str, ...] = ()
        #: Tasks since the start: begun, failed, and ended as neither success nor failure, such as a retry.
        self.accepted = self.fail = self.undecided = 0
        self.changed = threading.Event()
        #: Stops consuming the node's own queue; set when it is consumed.
        self.leave_queue: Callable[[], object] = bool
        #: Rows of the register and windows of the table at the last heartbeat, for `celery inspect`.
        self.nodes: list[dict[str, Any]] = []
        self.windows: list[dict[str, Any]] = []

    def accept(self, accepting: bool) -> None:
        """Take runs, or no more; the register hears of it at once."""
        self.accepting = accepting and not self.superseded
        self.changed.set()


def standing_of(app: Celery) -> Standing:
    """What this worker knows of itself; in a process that is no worker, a node that is in no register."""
    state = state_of(app)
    return state.once("standing", lambda: Standing(Identity(state.settings.node_name or "", None)))


def identity_of(app: Celery) -> Identity:
    """Who this worker is."""
    return standing_of(app).identity
