"""The two tables of the demo: the files to handle, and one row for every time a file was handled."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Engine,
    Integer,
    String,
    create_engine,
    event,
    make_url,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_claim import Claimable
from celery_claim.demo.plan import TABLE_PREFIX

#: SQLite numbers rows by itself only in a column of exactly this type.
Id = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Base of the demo's tables."""


class File(Claimable, Base):
    """A file of the standard library that waits to be hashed."""

    __tablename__ = TABLE_PREFIX + "file"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    path: Mapped[str] = mapped_column(String(500))


class Handling(Base):
    """One handling of a file. A file that is handled again gets a second row here, so nothing is hidden."""

    __tablename__ = TABLE_PREFIX + "handling"
    id: Mapped[int] = mapped_column(Id, primary_key=True)
    file_id: Mapped[int] = mapped_column(BigInteger, index=True)
    sha256: Mapped[str] = mapped_column(String(64))
    lines: Mapped[int] = mapped_column(BigInteger)
    worker_id: Mapped[str] = mapped_column(String(128))


def connect(database: str) -> Engine:
    """An engine of our own for this URL: the demo's view must not depend on the library it judges."""
    url = make_url(database)
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": 30})

    @event.listens_for(engine, "connect")
    def write_ahead(connection: Any, _record: Any) -> None:
        # Without the write-ahead log every reader would wait for every writer, this demo's progress bar included.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    return engine
