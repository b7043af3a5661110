"""The SQL that claims run, as text beside this test: a reviewer reads SQL, not Python.

`WRITE_SQL=1 ./dev test tests/conformance/test_statements.py` writes the files anew; read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conformance.test_mapping import SEED, bare

FOLDER = Path(__file__).parent / "sql"


def words(rendered: dict[str, str]) -> str:
    return "".join(f"-- {name}\n{statement};\n\n" for name, statement in sorted(rendered.items()))[:-1]


def compare(name: str, database, text: str) -> None:
    # One text for MySQL and MariaDB: they get the same statements.
    path = FOLDER / f"{name}.{'mysql' if database.can('mysql') else database.name}.sql"
    if os.environ.get("WRITE_SQL"):
        path.write_text(text)
    assert path.exists(), f"{path.name} is missing; WRITE_SQL=1 writes it"
    assert text == path.read_text()


def test_the_statements_are_the_ones_that_were_reviewed(queue, database):
    compare("claimable", database, words(queue().claims.rendered()))


def test_the_statements_of_the_least_table_are_the_ones_that_were_reviewed(queue, database):
    compare("three_columns", database, words(queue(model=bare(), values=SEED).claims.rendered()))


@pytest.mark.needs("mysql")
def test_every_change_is_bound_to_the_primary_key(queue):
    rendered = queue().claims.rendered()
    updates = {name: sql for name, sql in rendered.items() if sql.startswith("UPDATE")}

    assert len(updates) >= 8
    assert [name for name, sql in updates.items() if "FORCE INDEX (PRIMARY)" not in sql] == []


def test_every_write_of_an_owner_names_its_token_and_the_state(queue):
    rendered = queue().claims.rendered()

    for name in ("renew", "release", "succeed", "fail", "retry"):
        condition = rendered[name].partition("WHERE")[2]
        assert "claim_token = :token" in condition, name
        assert "status = 1" in condition, name
        assert ":keys" in condition, name
