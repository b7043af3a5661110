"""What a running handler may know of the run it is part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class OpenWindow:
    """`self.window` of a task while it drains."""

    #: time.monotonic() after which no further row is started; infinite in a drain without max_run_time.
    deadline: float
    #: Number of this consumer among those of its window; for logs, it divides nothing.
    consumer_id: int
    #: Whether the run should end: the window is over, or the worker shuts down. For long handlers to look at.
    should_stop: Callable[[], bool]
