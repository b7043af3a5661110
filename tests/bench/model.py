"""The model whose table every loop drains, the bare one too: so the shapes are the same."""

from __future__ import annotations

import functools

from sqlalchemy import BigInteger, String, Table, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_claim import Claimable


class Base(DeclarativeBase):
    pass


class Work(Claimable, Base):
    __tablename__ = "claim_bench"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    arguments: Mapped[str] = mapped_column(Text)


@functools.cache
def twin(tablename: str) -> Table:
    """Another table of the same shape, where several are needed at once."""

    class Apart(DeclarativeBase):
        pass

    class Twin(Claimable, Apart):
        __tablename__ = tablename

        id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
        name: Mapped[str] = mapped_column(String(100))
        arguments: Mapped[str] = mapped_column(Text)

    return Twin.__table__  # type: ignore[return-value]


WORK: Table = Work.__table__  # type: ignore[assignment]
#: The key first: the bare loop finds it there.
COLUMNS = ["id", *(column.name for column in WORK.columns if column.name != "id")]
