"""Names of the keys: everything of one queue carries the queue as hash tag, so it shares a cluster slot."""

from __future__ import annotations

from dataclasses import dataclass

#: Version of this layout. A later layout takes another prefix and never misreads this one.
LAYOUT = "cs1:"


@dataclass(frozen=True)
class Keys:
    """Key names under one prefix and one list of priority steps."""

    prefix: str = ""
    steps: tuple[int, ...] = (0, 3, 6, 9)

    def stream(self, queue: str, step: int) -> str:
        return f"{self._queue(queue)}:p{step}"

    def streams(self, queue: str) -> list[str]:
        """The task streams of a queue, the most urgent first."""
        return [self.stream(queue, step) for step in self.steps]

    def due(self, queue: str) -> str:
        """Sorted set: delayed message -> due time in ms by the server's clock."""
        return f"{self._queue(queue)}:eta"

    def delayed(self, queue: str) -> str:
        """Hash: delayed message -> its priority step and its fields."""
        return f"{self._queue(queue)}:etam"

    def dead(self, queue: str) -> str:
        return f"{self._queue(queue)}:dead"

    def meta(self, queue: str) -> str:
        return f"{self._queue(queue)}:meta"

    def wake(self, queue: str) -> str:
        """Stream that ends a blocked read early: an earlier due time, or a message given back."""
        return f"{self._queue(queue)}:wake"

    def to_fetch(self, queue: str) -> list[str]:
        """The keys that one read of a queue needs, in the order of the script."""
        return [*self.streams(queue), self.due(queue), self.delayed(queue), self.dead(queue)]

    def of_queue(self, queue: str) -> list[str]:
        """Every key of a queue but its dead letters."""
        return [*self.streams(queue), self.due(queue), self.delayed(queue), self.wake(queue), self.meta(queue)]

    def fanout(self, exchange: str) -> str:
        return f"{self.prefix}{LAYOUT}{{fanout:{exchange}}}"

    def bindings(self, exchange: str) -> str:
        return f"{self.prefix}{LAYOUT}bind:{exchange}"

    @property
    def exchanges(self) -> str:
        return f"{self.prefix}{LAYOUT}exchanges"

    @property
    def queues(self) -> str:
        return f"{self.prefix}{LAYOUT}queues"

    def _queue(self, queue: str) -> str:
        if not queue or queue.startswith("}"):
            # Redis would read an empty hash tag, and the keys of one queue would fall into several slots.
            raise ValueError(f"a queue cannot be named {queue!r}: the name must not be empty or begin with '}}'")
        return f"{self.prefix}{LAYOUT}{{{queue}}}"

    def step_of(self, priority: int) -> int:
        """The step that serves a priority: the largest one that is not above it."""
        return max((step for step in self.steps if step <= priority), default=self.steps[0])
