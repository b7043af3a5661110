"""Who a node is, and what it tells of itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4


@dataclass(frozen=True)
class Identity:
    """One start of one worker."""

    name: str
    role: str | None = None
    boot_id: str = field(default_factory=lambda: uuid4().hex)

    @property
    def queue(self) -> str:
        """The queue that only this node consumes."""
        return queue_of(self.name)


@dataclass(frozen=True)
class Vitals:
    """What a node tells of itself with each heartbeat."""

    accepting: bool
    pool_size: int
    max_running: int
    running: int
    success: int = 0
    fail: int = 0
    version: str = ""
    broker_id: str | None = None
    queues: Sequence[str] = ()

    @property
    def columns(self) -> dict[str, Any]:
        return {
            "accepting": self.accepting,
            "pool_size": self.pool_size,
            "max_running": self.max_running,
            "running": self.running,
            "success": self.success,
            "fail": self.fail,
            "version": self.version,
            "broker_id": self.broker_id,
            "queues": json.dumps(sorted(self.queues)),
        }


def queue_of(node: str) -> str:
    """The queue that only this node consumes."""
    return f"claim.{node}"
