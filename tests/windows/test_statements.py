"""The SQL that windows run, as text beside this test, and how much of it a fire needs.

`WRITE_SQL=1 ./dev test tests/windows/test_statements.py` writes the files anew; read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, bindparam, event, insert, literal, text
from sqlalchemy.sql import visitors
from sqlalchemy.sql.elements import BindParameter

from celery_claim.claims.sql.render import render
from celery_claim.database import Link
from celery_claim.nodes.sql.statements import statements_of
from celery_claim.windows.fire import fire
from celery_claim.windows.sql.entries import EntryStatements
from tests.conftest import Database
from tests.windows.fleet import Fleet

FOLDER = Path(__file__).parent / "sql"


def named(statements: Any) -> dict[str, Any]:
    """Every statement of a class that is made once, by its name."""
    kept = [name for name, value in vars(type(statements)).items() if hasattr(value, "attrname")]
    return {name: getattr(statements, name) for name in sorted(kept)}


def test_the_statements_are_the_ones_that_were_reviewed(fleet: Fleet, database: Database) -> None:
    every = {
        **named(fleet.first.statements),
        **{f"entry_{name}": each for name, each in named(EntryStatements(fleet.tables)).items()},
        **{f"node_{name}": each for name, each in named(statements_of(fleet.tables.nodes)).items()},
    }
    dialect = fleet.first.database.engine.dialect
    words = "".join(f"-- {name}\n{render(each, dialect)};\n\n" for name, each in every.items())[:-1]
    # One text for MySQL and MariaDB: they get the same statements.
    path = FOLDER / f"windows.{'mysql' if database.can('mysql') else database.name}.sql"

    if os.environ.get("WRITE_SQL"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(words)
    assert words == path.read_text()


def test_a_slot_with_32_runs_costs_five_statements(fleet: Fleet) -> None:
    for number in range(4):
        fleet.node(f"n{number}")
    fleet.declare(run_type="all", concurrency=8)
    sent: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *arguments: Any) -> None:
        if statement not in ("BEGIN", "BEGIN IMMEDIATE", "COMMIT"):
            sent.append(statement)

    with fleet.link() as link:
        assert link.connection is not None  # connecting has statements of its own
        event.listen(Engine, "before_cursor_execute", note)
        try:
            fires = fire(link, fleet.first.statements, ["w"], fleet.first.rules)
            assert fleet.first.publish(fires.runs, link)
        finally:
            event.remove(Engine, "before_cursor_execute", note)

    assert len(fires.runs) == 32
    assert len(sent) <= 5, sent


@pytest.mark.slow
def test_a_long_history_is_never_read_whole(fleet: Fleet, database: Database) -> None:
    """Of 60,000 runs of a hundred windows, what works at each slot reads a few."""
    now = fleet.first.look().now
    with fleet.link() as link:
        for number in range(60):
            row = {
                "window": f"w{number}", "slot_start": 0, "kind": "scheduled", "state": "done", "start_before": 0,
                "max_run_time": 1, "created_at": now - number * 60_000, "finished_at": now, "node": "n1",
            }  # fmt: skip
            link.execute(insert(fleet.tables.run), [{**row, "fire_seq": fire} for fire in range(1000)])
        if database.name != "sqlite":  # which knows nothing of how often a value occurs, and would guess wrong
            link.execute(text("ANALYZE" if database.name == "postgresql" else "ANALYZE TABLE celery_claim_run"))
    values = {
        "node_timeout": 20_000, "accept_timeout": 5000, "limit": 500, "retention": 604_800_000, "task_ids": ["a"],
        "names": ["w1"], "fires": [1], "of_window": "w1", "fire": 1, "consumer": 0, "number": 1, "to_node": "n1",
        "by_node": "n1", "boot": "b", "by_token": "t", "by_pid": 1, "timeout": 1,
    }  # fmt: skip
    for name in ("field", "waiting", "dead_runs", "miss_overdue", "too_old", "mark_published", "start"):
        statement = with_values(getattr(fleet.first.statements, name), values)
        compiled = statement.compile(fleet.first.database.engine, compile_kwargs={"literal_binds": True})
        with fleet.link() as link:
            look_up(link, database, name, str(compiled).replace("%%", "%"))


def look_up(link: Link, database: Database, name: str, query: str) -> None:
    """Assert that the statement reaches the runs by an index."""
    if database.name == "sqlite":
        plan = " / ".join(str(row[-1]) for row in link.connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}"))
        assert "SCAN celery_claim_run" not in plan, (name, plan)
    elif database.name == "postgresql":
        plan = " / ".join(str(row[0]) for row in link.connection.exec_driver_sql(f"EXPLAIN {query}"))
        assert "Seq Scan on celery_claim_run" not in plan, (name, plan)
    else:
        rows = [dict(row._mapping) for row in link.connection.exec_driver_sql(f"EXPLAIN {query}")]
        reads = [row for row in rows if row["table"] == "celery_claim_run"]
        assert all(row["key"] for row in reads), (name, rows)
        assert sum(int(row["rows"]) for row in reads) < 5000, (name, rows)


def with_values(statement: Any, values: dict[str, Any]) -> Any:
    """The statement with these values in the place of its parameters."""

    def fill(element: Any, **_: Any) -> Any:
        if not isinstance(element, BindParameter) or element.key not in values:
            return None
        value = values[element.key]
        if element.expanding:
            return bindparam(element.key, value, type_=element.type, expanding=True)
        return literal(value, element.type)

    return visitors.replacement_traverse(statement, {}, fill)
