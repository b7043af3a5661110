"""Processes that stay up between measurements and begin each one together."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

#: Seconds after which a measurement that has not ended is a bug, not a slow machine.
PATIENCE = 300


@dataclass(frozen=True)
class Seat:
    """Which of the consumers a process is in this measurement."""

    ordinal: int
    consumers: int


@dataclass(frozen=True)
class Turn:
    """What one process did. The clock is the machine's monotonic one, so turns can be compared."""

    began: float
    ended: float
    cpu_seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


class Crew:
    """Up to `size` processes, started once: importing Celery eight times for each figure would take longer
    than the measurement, and a fork would share what a new worker process must not share."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        self._members = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            member = context.Process(target=_serve, args=(theirs,), daemon=True)
            member.start()
            theirs.close()
            self._lines.append(ours)
            self._members.append(member)

    def run(self, consumers: int, prepare: Callable[..., Callable[[], dict[str, Any]]], *args: Any) -> list[Turn]:
        """One turn each of `consumers` processes.

        `prepare(seat, *args)` connects and warms up, outside the measurement; what it returns is timed.
        """
        lines = self._lines[:consumers]
        for ordinal, line in enumerate(lines):
            line.send((prepare, Seat(ordinal, consumers), args))
        self._answers(lines)  # all are ready
        for line in lines:
            line.send("go")
        return self._answers(lines)

    def _answers(self, lines: list[Connection]) -> list[Any]:
        answers = []
        for line in lines:
            if not line.poll(PATIENCE):
                raise TimeoutError(f"a consumer gave no answer in {PATIENCE} s")
            kind, answer = line.recv()
            if kind == "failed":
                raise RuntimeError(f"a consumer failed:\n{answer}")
            answers.append(answer)
        return answers

    def close(self) -> None:
        for line in self._lines:
            line.close()
        for member in self._members:
            member.join(5)
            if member.is_alive():
                member.kill()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def rows_per_second(turns: list[Turn], rows: int) -> float:
    """From the first begin to the last end, so that a consumer without work counts as waiting."""
    return rows / (max(turn.ended for turn in turns) - min(turn.began for turn in turns))


def _serve(line: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            prepare, seat, args = line.recv()
        except EOFError:
            return
        try:
            work = prepare(seat, *args)
            line.send(("ready", None))
            line.recv()
            cpu, began = time.process_time(), time.monotonic()
            facts = work()
            turn = Turn(began, time.monotonic(), time.process_time() - cpu, facts)
            line.send(("done", turn))
        except Exception:
            line.send(("failed", traceback.format_exc()))


def _end_with_parent() -> None:
    """A consumer in the middle of a drain would go on after a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
