"""What every task has whose work is the rows of a table: its table, its database, its checks, and its runs."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import celery
from celery.utils.threads import LocalStack

from celery_claim.app import database_for, setup, state_of
from celery_claim.options import check_names, check_values, where
from celery_claim.outages import Outage
from celery_claim.rows.window import OpenWindow

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from celery_claim.database import Database

logger = logging.getLogger(__name__)


class Run(Protocol):
    """A consumer at work, whatever it does with the rows of its table."""

    @property
    def deadline(self) -> float:
        """time.monotonic() after which it starts no further row."""

    @property
    def consumer_id(self) -> int:
        """Its number among those of its window."""

    def stopping(self) -> bool:
        """Whether it should end."""


class TableTask(celery.Task):  # type: ignore[type-arg]
    """A task whose work is the rows of a table. All options are class attributes."""

    abstract = True
    #: The handler's signature is not the message's: a message has no arguments.
    typing = False
    ignore_result = True
    #: Empty runs must not push real tasks out of a monitor's memory.
    send_events = False

    #: ORM class or sqlalchemy.Table whose rows are the work; or `table`.
    model: Any = None
    #: Name of an existing table without a model, read from the database at first use.
    table: str | None = None
    #: Schema of `table`.
    schema: str | None = None
    #: The database of this task, where it is not the app's claim_database_url; or `engine`.
    database_url: str | None = None
    #: A SQLAlchemy engine to copy: same URL and pool settings, connections of our own.
    engine: Engine | None = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        check_names(cls, cls.__mro__[1])

    @classmethod
    def on_bound(cls, app: celery.Celery) -> None:
        """Check the options and arm the plugin for the app; Celery calls this more than once."""
        if cls.__dict__.get("abstract"):
            return
        check_values(cls)
        setup(app)

    @classmethod
    def check_together(cls) -> None:
        """Refuse options that work alone and not together. Raises ConfigurationError."""

    @classmethod
    def handler_and_arguments(cls) -> tuple[Any, tuple[str, ...]]:
        """The user's function as it will be called, and the names of what it gets."""
        raise NotImplementedError

    @property
    def window(self) -> OpenWindow | None:
        """The run that the calling handler is part of; None outside of one."""
        window: OpenWindow | None = _windows.top
        return window

    @property
    def database(self) -> Database:
        """The database of this task. Raises ConfigurationError when there is none."""
        return database_for(self.app, where(type(self)), url=self.database_url, engine=self.engine)

    @contextmanager
    def _opened(self, run: Run) -> Iterator[None]:
        """The block is the run that handlers see as `self.window`."""
        _windows.push(OpenWindow(run.deadline, run.consumer_id, run.stopping))
        try:
            yield
        finally:
            _windows.pop()

    def _outage(self) -> Outage:
        return state_of(self.app).once(("outage", type(self)), lambda: Outage(f"task {self.name}", logger))

    def _node(self) -> str:
        return state_of(self.app).settings.node_name or self.request.hostname or socket.gethostname()


#: The runs of this thread or greenlet, innermost last: one stack serves all threads.
_windows: Any = LocalStack()
