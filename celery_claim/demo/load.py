"""load: one row per file of the running Python's standard library."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import cycle, islice

from sqlalchemy import Engine, MetaData, func, insert, inspect, select
from sqlalchemy.exc import SQLAlchemyError

from celery_claim import Status
from celery_claim.demo.plan import TABLE_PREFIX
from celery_claim.demo.run import DemoError
from celery_claim.demo.tables import Base, File

#: Not the standard library: installed packages, and caches that Python rewrites while we run.
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}
ROWS_PER_INSERT = 1000


def python() -> str:
    """Name and version of the running Python."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def files() -> Iterator[str]:
    """Every readable file of the standard library, in a stable order."""
    for folder, below, names in os.walk(sysconfig.get_path("stdlib")):
        below[:] = sorted(set(below) - LEFT_OUT)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if path.isprintable() and len(path) <= 500 and os.path.isfile(path) and os.access(path, os.R_OK):
                yield path


def existing_tables(engine: Engine) -> set[str]:
    """The names of the tables that are there before the demo makes its own."""
    return set(inspect(engine).get_table_names())


def check_tables(engine: Engine, present: set[str]) -> None:
    """Raises DemoError when tables of our names hold something else, or belong to a demo that is at work."""
    leftovers = [table for table in Base.metadata.sorted_tables if table.name in present]
    for table in leftovers:
        columns = {column["name"] for column in inspect(engine).get_columns(table.name)}
        if columns != set(table.columns.keys()):
            raise DemoError(
                f"table {table.name} exists and is not the demo's: it has other columns. Nothing was touched"
            )
    if File.__table__ in leftovers and (busy := _held(engine)):
        raise DemoError(
            f"table {File.__tablename__} has {busy} rows that are being processed: another demo is at work on this "
            f"database. If none is, drop the tables {TABLE_PREFIX}*. Nothing was touched"
        )


def create(engine: Engine, *, others: set[str]) -> None:
    """Make the demo's tables, in place of those that an earlier demo has left; others are not the demo's."""
    drop(engine, others=others)
    Base.metadata.create_all(engine)


def insert_rows(engine: Engine, *, limit: int | None) -> int:
    """Insert one row per file and say how many; with a limit that many rows, beginning again where the files end."""
    paths: Iterable[str] = files()
    if limit is not None:
        paths = islice(cycle(paths), limit)
    total = 0
    paths = iter(paths)
    with engine.begin() as connection:
        while page := list(islice(paths, ROWS_PER_INSERT)):
            pending = [{"path": path, "status": int(Status.PENDING)} for path in page]
            connection.execute(insert(File), pending)
            total += len(page)
    return total


def drop(engine: Engine, *, others: set[str]) -> None:
    """Drop every table with the demo's prefix, without these others."""
    Base.metadata.drop_all(engine)
    reflected = inspect(engine).get_table_names()
    ours = [name for name in reflected if name.startswith(TABLE_PREFIX) and name not in others]
    if ours:
        metadata = MetaData()
        metadata.reflect(engine, only=ours)
        metadata.drop_all(engine)


def check_database(engine: Engine) -> None:
    """Raises DemoError when the database does not answer."""
    try:
        with engine.connect() as connection:
            connection.execute(select(1))
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        text = str(cause).strip()
        if engine.url.password:
            text = text.replace(str(engine.url.password), "***")
        raise DemoError(f"the database {engine.url.render_as_string()} does not answer: {text}") from None


def _held(engine: Engine) -> int:
    with engine.connect() as connection:
        held = select(func.count()).select_from(File).where(File.status == Status.PROCESSING)
        return connection.execute(held).scalar_one()
