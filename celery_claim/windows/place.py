"""Where the runs of a fire go: which nodes, and which consumer ids are free."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_claim.windows.window import Window

#: The node of a run that any free worker may take.
ANY = ""


@dataclass(frozen=True)
class Node:
    """A node that lives and takes runs."""

    name: str
    running: int = 0
    pool_size: int = 1
    role: str | None = None
    #: Names of the queues it consumes; None: not known.
    queues: frozenset[str] | None = None

    def consumes(self, queue: str | None) -> bool:
        return queue is None or self.queues is None or queue in self.queues


@dataclass(frozen=True)
class Place:
    """A consumer id on a node, without a live run."""

    node: str
    consumer_id: int
    #: Its number over all nodes of the fire.
    ordinal: int


@dataclass
class Field:
    """Every live node and every live run, as one statement saw them."""

    nodes: Sequence[Node]
    #: (window, node, consumer id) of each live run.
    live: set[tuple[str, str, int]]
    #: Owner of the lease of the main node.
    main: str | None
    #: The database's clock.
    now: int = 0
    #: Runs per node: those that are live, and those planned since.
    load: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any]], *, main_node: str | None = None) -> Field:
        """`main_node`: claim_main_node, which makes the lease needless."""
        nodes: list[Node] = []
        live: set[tuple[str, str, int]] = set()
        main, now = main_node, 0
        for what, node, text, number, role, pool_size in rows:
            if what == "node":
                queues = None if text is None else frozenset(json.loads(text))
                nodes.append(Node(node, number, pool_size, role, queues))
            elif what == "run":
                live.add((text, node, number))
            elif what == "clock":
                now = number
            elif main_node is None:
                main = node
        nodes.sort(key=lambda each: each.name)
        return cls(nodes, live, main, now, Counter(node for _, node, _ in live))

    def places(self, window: Window, queue: str | None) -> tuple[int, list[Place]] | str:
        """How many places the window has in all, and those of them that are free; or why there is none.

        `queue`: only nodes that consume it are meant; None: all.
        """
        nodes: Sequence[str]
        if window.run_type == "any":
            nodes = [ANY]
        else:
            chosen = self._chosen(window, queue)
            if isinstance(chosen, str):
                return chosen
            nodes = chosen
        free = [
            Place(node, consumer_id, number * window.concurrency + consumer_id)
            for number, node in enumerate(nodes)
            for consumer_id in range(window.concurrency)
            if not self.is_busy(window, node, consumer_id)
        ]
        self.load.update(place.node for place in free)
        return len(nodes) * window.concurrency, free

    def another(self, than: str, queue: str | None) -> str | None:
        """A node that could take over a run that `than` has not started: it consumes the queue and has a free
        place in its pool."""
        able = [
            node
            for node in self.nodes
            if node.name != than and node.consumes(queue) and self._load_of(node) < node.pool_size
        ]
        if not able:
            return None
        chosen = min(able, key=lambda node: (self._load_of(node), node.name)).name
        self.load[chosen] += 1
        return chosen

    def _chosen(self, window: Window, queue: str | None) -> list[str] | str:
        able = [node for node in self.nodes if node.consumes(queue)]
        if not able:
            return "no live node accepts runs" + (f" and consumes queue {queue!r}" if queue else "")
        if window.run_type == "all":
            return [node.name for node in able]
        if window.run_type == "main":
            if self.main is None:
                return "there is no main node: start a worker with --claim-role main, or set claim_main_node"
            if self.main not in {node.name for node in able}:
                return f"the main node {self.main} does not take runs"
            return [self.main]
        least = min(map(self._load_of, able))
        idle = [node for node in able if self._load_of(node) == least]
        return [idle[window.fire_seq % len(idle)].name]

    def _load_of(self, node: Node) -> int:
        # A node tells of its tasks only now and then; the table of runs knows of those that were just sent to it.
        return max(node.running, self.load[node.name])

    def is_busy(self, window: Window, node: str, consumer_id: int) -> bool:
        """Whether a live run has this consumer id."""
        if window.run_type == "all":
            return (window.name, node, consumer_id) in self.live
        # One consumer of each number, wherever it runs: a long row on another node occupies its number.
        return any((name, number) == (window.name, consumer_id) for name, _, number in self.live)


def queue_of(window: Window, routed: Mapping[str, str], default: str) -> str | None:
    """The queue whose consumers a window is meant for; None when it is the default one, which says nothing.

    `routed`: task -> the queue that Celery's own routing sends it to.
    """
    queue = window.definition.queue or routed.get(window.task)
    return None if queue == default else queue
