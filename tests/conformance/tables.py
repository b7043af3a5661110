"""A claimable table with a task on it, on each database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import BigInteger, String, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_claim import Claimable, ClaimTask, Status
from celery_claim.claims.claim import Claim, claim
from celery_claim.claims.write_back import Outcome, WriteBack, write_back
from celery_claim.testing import age

SUCCEEDED = Outcome(Status.SUCCEEDED)


def mail_model(key_type: Any = None, **attributes: Any) -> type[Any]:
    """A fresh model of the table `mail`: id, address, answer and the claim columns."""

    class Base(DeclarativeBase):
        pass

    class Mail(Claimable, Base):
        __tablename__ = "mail"
        id: Mapped[Any] = mapped_column(key_type or BigInteger, primary_key=True, autoincrement=False)
        address: Mapped[str | None] = mapped_column(String(100))
        answer: Mapped[str | None] = mapped_column(String(100))

    return Mail


class Queue:
    """A table, the task that consumes it, and the test's own eyes on it."""

    def __init__(
        self, database: Any, handler: Callable[..., Any] | None, model: Any, url: str, options: dict[str, Any]
    ) -> None:
        self.database = database
        self.model = model
        self.engine = database.engine()
        #: Keys that the handler was called with, in order.
        self.handled: list[Any] = []
        self.app = Celery("proj", broker="memory://", set_as_current=False)
        self.app.conf.claim_database_url = url
        if model is not None:
            self.table = getattr(model, "__table__", model)
            # All tables of the model's family: those of subclasses, of other schemas.
            self.table.metadata.create_all(self.engine)
            options = {"model": model, **options}
        self.task = self._task(handler, options)

    def _task(self, handler: Callable[..., Any] | None, options: dict[str, Any]) -> Any:
        base = options.pop("base", ClaimTask)
        if handler is None and base is ClaimTask:
            handler = self.seen
        if handler is None:
            return self.app.register_task(type("work", (base,), {"name": "work", **options})())
        if handler.__name__ == "<lambda>":
            handler.__name__ = "handle"  # Celery writes the name into source code
        task = self.app.task(base=base, name="work", shared=False, **options)(handler)
        _ = task.name  # made now: threads that are the first to use it would make it twice
        return task

    def seen(self, row: Any) -> None:
        """The default handler: it remembers the key."""
        self.handled.append(row.id)

    @property
    def claims(self) -> Any:
        return self.task.claims

    @property
    def statements(self) -> Any:
        return self.task.claims.statements

    # ---- what is in the table

    def insert(self, keys: Sequence[Any] | int = 1, **columns: Any) -> list[Any]:
        """Add rows with these keys (or 1 to n); returns the keys."""
        keys = list(range(1, keys + 1)) if isinstance(keys, int) else list(keys)
        with self.engine.begin() as connection:
            for start in range(0, len(keys), 1000):
                connection.execute(insert(self.table), [{"id": key, **columns} for key in keys[start : start + 1000]])
        return keys

    def change(self, keys: Sequence[Any] | None = None, **columns: Any) -> None:
        """Change columns of some rows, or of all, behind everybody's back."""
        statement = self.table.update().values(**columns)
        with self.engine.begin() as connection:
            connection.execute(statement if keys is None else statement.where(self.table.c.id.in_(keys)))

    def row(self, key: Any = 1) -> Any:
        """What is in the table for a key."""
        with self.engine.connect() as connection:
            return connection.execute(select(self.table).where(self.table.c.id == key)).one()

    def keys(self, status: Status | None = None) -> list[Any]:
        """Keys in a state, or all, in order."""
        statement = select(self.table.c.id).order_by(self.table.c.id)
        with self.engine.connect() as connection:
            guarded = statement if status is None else statement.where(self.table.c.status == int(status))
            return list(connection.execute(guarded).scalars())

    # ---- single steps of a consumer

    def claim(self, limit: int = 100, lease_seconds: int | None = 600, worker_id: str = "me", offset: int = 0) -> Claim:
        with self.claims.linked() as link:
            return claim(
                link, self.statements, limit=limit, lease_seconds=lease_seconds, worker_id=worker_id, offset=offset
            )

    def write_back(self, claimed: Claim, outcome: Outcome = SUCCEEDED, keys: Sequence[Any] | None = None) -> WriteBack:
        outcomes = dict.fromkeys(claimed.rows if keys is None else keys, outcome)
        with self.claims.linked() as link:
            return write_back(link, self.statements, claimed.token, outcomes)

    def age(self, seconds: float, keys: Sequence[Any] | None = None) -> None:
        age(self.task, seconds, keys)

    def close(self) -> None:
        try:
            self.claims.database.dispose()
        except Exception:  # a queue that a test could not make usable has nothing to dispose of
            pass


@pytest.fixture
def queue(database: Any) -> Iterator[Callable[..., Queue]]:
    """queue(handler=None, rows=0, url=None, model=..., **options of the task) -> a Queue on the test's database.

    `model=None` makes no table; the task then names one with `table=`.
    """
    made: list[Queue] = []

    def make(
        handler: Callable[..., Any] | None = None,
        *,
        rows: int = 0,
        url: str | None = None,
        model: Any = ...,
        **options: Any,
    ) -> Queue:
        one = Queue(database, handler, mail_model() if model is ... else model, url or database.url, options)
        made.append(one)
        if rows:
            one.insert(rows)
        return one

    yield make
    for one in made:
        one.close()
