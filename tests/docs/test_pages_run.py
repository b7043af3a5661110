"""Every code block of the tutorial and the how-to guides is run, in order, as its reader would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import text

from tests.docs.pages import DOCS, REPOSITORY, Folder, blocks
from tests.processes import eventually


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Callable[..., Folder]]:
    """folder(replacing=..., sql=...) -> an empty folder in which a page is run."""
    made: list[Folder] = []

    def make(**options: Any) -> Folder:
        made.append(Folder(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.slow
def test_the_tutorial_does_what_it_says(folder: Callable[..., Folder]) -> None:
    folder().run(DOCS / "tutorial" / "first-claim.md")


@pytest.mark.slow
def test_the_guide_to_existing_tables_does_what_it_says(folder: Callable[..., Folder], mariadb: Any) -> None:
    def execute(statements: str) -> None:
        with mariadb.engine().begin() as connection:
            for statement in statements.split(";"):
                if statement.strip():
                    connection.exec_driver_sql(statement)

    here = folder(replacing={"mysql+mysqldb://shop:secret@localhost/shop": mariadb.url}, sql=execute)

    here.run(DOCS / "howto" / "claim-an-existing-table.md")


@pytest.mark.slow
def test_the_guide_to_testing_does_what_it_says(folder: Callable[..., Folder]) -> None:
    folder().run(DOCS / "howto" / "test-your-tasks.md")


@pytest.mark.slow
def test_the_guide_without_redis_does_what_it_says(folder: Callable[..., Folder], tmp_path: Path) -> None:
    folder(replacing={"/var/lib/proj": str(tmp_path)}).run(DOCS / "howto" / "run-without-redis.md")


def test_the_guide_to_idempotency_does_what_it_says(folder: Callable[..., Folder]) -> None:
    folder().run(DOCS / "howto" / "be-idempotent.md")


@pytest.mark.slow
def test_the_guide_to_retries_does_what_it_says(folder: Callable[..., Folder]) -> None:
    folder().run(DOCS / "howto" / "retry-and-recover.md")


@pytest.mark.slow
def test_the_guide_to_the_broker_moves_tasks_without_losing_one(
    folder: Callable[..., Folder], redis_server: Any
) -> None:
    page = DOCS / "howto" / "move-from-redis.md"
    place = redis_server.url.removeprefix("redis://").rpartition("/")[0]
    here = folder(replacing={"localhost:6379": place})
    here.run(page)
    consoles = [block for block in blocks(page) if block.language == "console"]
    with Celery("proj", broker=f"redis://{place}/0", backend=f"redis://{place}/1", set_as_current=False) as old:
        waiting = [old.send_task("proj.add", (number, number)) for number in range(3)]
        here.run_block(replace(consoles[0], mark=""))
        here.run_block(replace(consoles[0], mark="background", code="$ celery -A moved worker -P solo -l INFO\n"))
        for block in consoles[1:]:
            here.run_block(replace(block, mark="", code=block.code.replace("-A proj", "-A moved")))

        assert [result.get(timeout=20) for result in waiting] == [0, 2, 4]


@pytest.mark.slow
def test_the_smallest_program_of_the_readme_works(
    folder: Callable[..., Folder], mariadb: Any, valkey_server: Any
) -> None:
    here = folder(
        replacing={
            "redis-streams://localhost:6379/0": valkey_server.url.replace("redis://", "redis-streams://", 1),
            "mysql+mysqldb://root@localhost/proj": mariadb.url,
        }
    )
    here.run(REPOSITORY / "README.md")
    (page,) = [block for block in blocks(REPOSITORY / "README.md") if "celery -A proj beat" in block.code]
    for command, _ in page.commands():
        background = command.split()[3] in ("worker", "beat")
        here.run_block(replace(page, mark="background" if background else "", code=f"$ {command}\n"))

    with mariadb.engine().begin() as connection:
        connection.execute(text("INSERT INTO mail (address) VALUES ('ada@example.org'), ('grace@example.org')"))

    def succeeded() -> bool:
        with mariadb.engine().connect() as connection:
            return connection.scalar(text("SELECT COUNT(*) FROM mail WHERE status = 2")) == 2

    eventually(succeeded, timeout=30)
