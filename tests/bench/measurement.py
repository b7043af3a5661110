"""What is measured, and the JSON lines that keep it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: Loops that a figure can be compared with, and ours.
RAW, RAW_OFFSETS, CORE, ORM = "raw loop", "raw loop, offsets", "ClaimTask, Table", "ClaimTask, ORM model"
#: The table of a depth case that the others are compared with.
SHALLOW = "shallow"


@dataclass(frozen=True)
class Case:
    """One thing that is measured once in every round."""

    part: str  # loop, peers or depth
    database: str
    what: str  # the loop, or the peer's name
    batch: int = 0
    done: str = ""  # row or batch: how finished rows are written back
    consumers: int = 1
    table: str = ""  # depth: what the table holds

    def like(self, what: str) -> Case:
        """The case of the same shape for another loop."""
        return Case(**{**asdict(self), "what": what})


@dataclass(frozen=True)
class Measurement:
    case: Case
    round: int
    facts: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        return json.dumps({**asdict(self.case), "round": self.round, **self.facts})


def read(*paths: Path) -> tuple[dict[str, Any], list[Measurement]]:
    """The conditions, and what was measured under them, as runs have written them; servers of all, the rest of one."""
    conditions: dict[str, Any] = {}
    found = []
    for line in (line for path in paths for line in path.read_text().splitlines()):
        facts = json.loads(line)
        if "conditions" in facts:
            servers = conditions.get("servers", {}) | facts["conditions"]["servers"]
            conditions = facts["conditions"] | {"servers": servers}
            continue
        case = Case(**{name: facts.pop(name) for name in Case.__dataclass_fields__})
        found.append(Measurement(case, facts.pop("round"), facts))
    return conditions, found


class Ledger:
    """Measurements, written to a file as they come: an interrupted run keeps what it has."""

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.path.write_text(json.dumps({"conditions": conditions}) + "\n")

    def add(self, measurement: Measurement) -> None:
        with self.path.open("a") as file:
            file.write(measurement.line() + "\n")

    def measurements(self) -> Iterable[Measurement]:
        return read(self.path)[1]
