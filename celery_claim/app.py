"""What celery_claim keeps for each Celery app: its settings, its databases, and that it is armed.

Nothing is kept in module globals: every app that finalizes in a process gets a copy of shared tasks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from celery_claim.exceptions import ConfigurationError
from celery_claim.settings import Settings, misread, resolve

if TYPE_CHECKING:
    from celery import Celery
    from sqlalchemy import Engine

    from celery_claim.database import Database
    from celery_claim.tasks import ClaimTask
    from celery_claim.windows.sql.tables import WindowTables

T = TypeVar("T")


class State:
    """What belongs to one app in this process."""

    def __init__(self, conf: Any) -> None:
        self._conf = conf
        self._lock = threading.RLock()
        self._made: dict[Hashable, Any] = {}
        self.armed = False

    @property
    def settings(self) -> Settings:
        """The app's claim_* settings. Raises ConfigurationError for one that cannot work."""
        return self.once("settings", lambda: resolve(self._conf))

    def renew_lock(self) -> None:
        """In a forked child, where the lock's owner does not exist."""
        self._lock = threading.RLock()

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned the first time it was needed in this app."""
        try:
            made: T = self._made[name]
            return made
        except KeyError:
            pass
        with self._lock:
            if name not in self._made:
                self._made[name] = make()
            made = self._made[name]
            return made


_states: weakref.WeakKeyDictionary[Celery, State] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def state_of(app: Celery) -> State:
    """The state of an app; `app` may be Celery's proxy of the current one."""
    app = app._get_current_object() if hasattr(app, "_get_current_object") else app
    with _lock:
        state = _states.get(app)
        if state is None:
            state = _states[app] = State(app.conf)
        return state


def _renew_locks() -> None:
    # Another thread of the parent may have held one of them at the moment of the fork.
    global _lock
    _lock = threading.Lock()
    for state in list(_states.values()):
        state.renew_lock()


os.register_at_fork(after_in_child=_renew_locks)


def setup(app: Celery) -> None:
    """Arm the plugin for an app: maintenance in its workers, the queue and task of windows.

    Binding a task of ours to an app does this by itself. Harmless when repeated, and without claim_database_url.
    """
    state = state_of(app)
    if state.armed:
        return
    state.armed = True
    from celery_claim.bootsteps import arm

    arm(app)


def database_for(app: Celery, whose: str, *, url: str | None = None, engine: Engine | None = None) -> Database:
    """The database of a task: its own engine or URL, else the app's; one per URL and app.

    Raises ConfigurationError when there is none.
    """
    from celery_claim.database import Database

    state = state_of(app)
    if engine is not None:
        return state.once(("engine", id(engine)), lambda: Database.of(engine))
    settings = state.settings
    if url is None and settings.database_url is None:
        wrong = misread(app.conf)
        hint = f" ({wrong[0]} is not read: write it in lower case, or give Celery a namespace)" if wrong else ""
        raise ConfigurationError(
            f"{whose} has no database: set claim_database_url, or database_url= or engine= of the task{hint}"
        )
    chosen = url if url is not None else settings.database_url
    options = settings.database_engine_options
    return state.once(("url", str(chosen)), lambda: Database(chosen or "", engine_options=options))


def own_tables(app: Celery) -> WindowTables:
    """celery_claim's own tables as this app calls them."""
    from celery_claim.windows.sql.tables import WindowTables

    state = state_of(app)
    return state.once("tables", lambda: WindowTables.of(state.settings.table_prefix, state.settings.table_schema))


def claim_tasks(app: Celery) -> Iterator[ClaimTask]:
    """The app's own ClaimTasks, by name; copies of other apps' shared tasks without a database are passed over."""
    from celery_claim.tasks import ClaimTask

    has_database = state_of(app).settings.database_url is not None
    for _, task in sorted(app.tasks.items()):
        if isinstance(task, ClaimTask) and (has_database or task.database_url or task.engine is not None):
            yield task
