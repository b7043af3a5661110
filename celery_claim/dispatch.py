"""Windows for one Celery app: what it declares, who fires, and the messages that start runs.

The flow in windows/ decides in the database; here its runs become ordinary Celery messages.
"""

from __future__ import annotations

import getpass
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_claim.app import database_for, own_tables, state_of
from celery_claim.broker import Broker, batched
from celery_claim.exceptions import ClaimError, ConfigurationError, StatementRefused
from celery_claim.nodes import identity, leases, registry
from celery_claim.nodes.sql.create import create_tables, missing_tables, record_version
from celery_claim.outages import Outage
from celery_claim.schedules import window_in
from celery_claim.windows import adjust, history, maintain
from celery_claim.windows.fire import Fires, Outcome, Rules, Run, fire, trigger
from celery_claim.windows.place import queue_of
from celery_claim.windows.sql.statements import WindowStatements
from celery_claim.windows.window import Definition, Window

if TYPE_CHECKING:
    from celery import Celery
    from kombu import Queue

    from celery_claim.database import Database, Link

logger = logging.getLogger(__name__)

#: A message of a run that nobody took is of no use after this many node timeouts; the row tells when it is late.
NODE_QUEUE_TIMEOUTS = 3


@dataclass(frozen=True)
class Look:
    """All windows of the table at one instant."""

    now: int
    windows: Mapping[str, Window]


class Triggered(NamedTuple):
    """What became of a trigger."""

    outcome: Outcome
    #: Why there is no node for it.
    reason: str | None
    #: The number of the fire, when there is one: by the time somebody asks, the window may have been fired again.
    fire_seq: int | None


class Dispatcher:
    """The windows of one app."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.settings = state_of(app).settings
        self.broker = Broker(app)
        self._outage = Outage("sending runs of windows", logger)
        #: Window -> the trouble with its messages alone.
        self._refused: dict[str, Outage] = {}
        self._warned: dict[str, str] = {}
        self._routes: dict[str, str] = {}

    @classmethod
    def of(cls, app: Celery) -> Dispatcher:
        """The dispatcher of an app in this process."""
        state = state_of(app)
        return state.once("dispatcher", lambda: cls(app))

    # ---- what is declared

    def declared(self) -> dict[str, Definition]:
        """The windows in beat_schedule, by name.

        Raises ConfigurationError for two of one name and for what the settings do not allow.
        """
        definitions: dict[str, Definition] = {}
        for key, entry in dict(self.app.conf.beat_schedule or {}).items():
            declared = window_in(entry)
            if declared is None:
                continue
            definition = Definition.from_entry(declared["name"] or key, declared)
            if definition.name in definitions:
                raise ConfigurationError(f"beat_schedule: two windows are called {definition.name!r}: rename one")
            self._check(definition)
            definitions[definition.name] = definition
        return definitions

    def name_of(self, declared: Mapping[str, Any]) -> str:
        """The name of a window that came in a message: its own, or the key of its entry in beat_schedule."""
        if declared.get("name"):
            return str(declared["name"])
        for key, entry in dict(self.app.conf.beat_schedule or {}).items():
            if window_in(entry) == declared:
                return str(key)
        return str(declared["task"])

    def register(self, definitions: Mapping[str, Definition]) -> list[str]:
        """Write new and changed definitions into the table; returns their names."""
        with self._linked() as link:
            return adjust.register(link, self.statements, definitions.values(), self.rules)

    def look(self) -> Look:
        """All windows of the table, and the database's clock."""
        with self._linked() as link:
            rows = link.execute(self.statements.look).mappings().all()
            now = rows[0]["now"] if rows else link.execute(self.statements.clock).scalar_one()
        windows = [Window.from_row(row, self.rules.cap) for row in rows]
        return Look(now, {window.name: window for window in windows})

    def nodes(self) -> list[dict[str, Any]]:
        """The register of nodes, by name."""
        with self._linked() as link:
            tables = own_tables(self.app).nodes
            return registry.nodes(link, tables, timeout_ms=round(self.settings.node_timeout * 1000))

    def main_node(self) -> str | None:
        """The node that runs of run_type main go to; None when there is none."""
        if self.settings.main_node is not None:
            return self.settings.main_node
        with self._linked() as link:
            lease = leases.read(link, own_tables(self.app).nodes, leases.MAIN_LEASE)
        return lease.owner if lease is not None and lease.left_ms > 0 else None

    @property
    def broker_error(self) -> str | None:
        """Why the last runs were not sent; None when they were."""
        return next((each.error for each in (self._outage, *self._refused.values()) if each.error is not None), None)

    def history(self, **filters: Any) -> list[dict[str, Any]]:
        """Runs, newest first; `filters` as in windows.history.runs."""
        with self._linked() as link:
            return history.runs(link, self.statements, **filters)

    def forget(self, name: str) -> bool:
        """Take a window out of the table; its history stays, and code that declares it enters it again."""
        with self._linked() as link:
            return adjust.forget(link, self.statements, name)

    # ---- what opens windows

    def fire(self, names: Iterable[str], *, patient: bool = False) -> dict[str, Outcome]:
        """Fire those of the windows whose slot has not been fired, and send their runs.

        `patient`: a window for whose runs there is no node just now is left for a later try in the same slot. Raises
        DatabaseUnavailable and other ClaimErrors; trouble with the broker is logged, and the runs are sent later.
        """
        with self._linked() as link:
            fires = fire(link, self.statements, list(names), self.rules, patient=patient)
            self._tell(fires)
            self.publish(fires.runs, link)
        return fires.outcomes

    def fire_declared(self, declared: Mapping[str, Any]) -> Outcome:
        """Fire the window that a message of another scheduler carries."""
        name = self.name_of(declared)
        definition = Definition.from_entry(name, declared)
        self._check(definition)
        self.register({name: definition})
        return self.fire([name])[name]

    def trigger(self, name: str, *, by: str | None = None) -> Triggered:
        """Open a window now, whatever the time.

        Of any number of callers one wins. `by` goes into the history; by default user and host. Raises LookupError for
        a window that nobody declared.
        """
        with self._linked() as link:
            fires = trigger(link, self.statements, name, self.rules, by=by or _whoami())
            if fires.outcomes[name] is Outcome.UNKNOWN:
                definitions = self.declared()
                if name not in definitions:
                    raise LookupError(f"no window is called {name!r}")
                adjust.register(link, self.statements, [definitions[name]], self.rules)
                fires = trigger(link, self.statements, name, self.rules, by=by or _whoami())
            self.publish(fires.runs, link)
        return Triggered(fires.outcomes[name], fires.reasons.get(name), fires.runs[0].fire_seq if fires.runs else None)

    def wake(self, task: str) -> bool:
        """Open every enabled window of a task now; whether one opened. Raises LookupError when the task has none."""
        names = [name for name, window in self.look().windows.items() if window.task == task]
        names += [name for name, each in self.declared().items() if each.task == task and name not in names]
        if not names:
            raise LookupError(f"no window of beat_schedule is for task {task!r}")
        opened = [name for name in names if self.trigger(name, by=f"wake {_whoami()}").outcome is Outcome.FIRED]
        return bool(opened)

    # ---- what a person changes

    def pause(self, name: str) -> None:
        """Fire no further slot. Raises LookupError."""
        self._adjusting(name)
        with self._linked() as link:
            adjust.pause(link, self.statements, name, self.rules)

    def resume(self, name: str) -> None:
        """Fire again, from the next slot on. Raises LookupError."""
        self._adjusting(name)
        with self._linked() as link:
            adjust.resume(link, self.statements, name, self.rules)

    def set_concurrency(self, name: str, concurrency: int | None) -> Window:
        """Change how many consumers a window has, also of one that is open; None: as declared.

        Raises LookupError, and ConfigurationError for a number above the cap.
        """
        self._adjusting(name)
        with self._linked() as link:
            window, runs = adjust.set_concurrency(link, self.statements, name, concurrency, self.rules)
            self.publish(runs, link)
        return window

    # ---- messages

    def publish(self, runs: Sequence[Run], link: Link) -> bool:
        """Send the messages of runs and note it in their rows; False when the broker does not take them.

        Crash before or between: runs that are not noted as published are sent by the maintenance of any worker; one
        that had been sent already finds its run started, or starts it, and the second delivery finds it so.
        """
        if not runs:
            return True
        sent = self._sent(runs)
        if sent:
            with suppress(ClaimError):  # then the maintenance sends them once more, which is harmless
                link.execute(
                    self.statements.mark_published,
                    {
                        "task_ids": [run.task_id for run in sent],
                        "names": sorted({run.window.name for run in sent}),
                        "fires": sorted({run.fire_seq for run in sent}),
                    },
                )
        return len(sent) == len(runs)

    def _sent(self, runs: Sequence[Run]) -> list[Run]:
        """Those of the runs whose message is out."""
        if self.broker.rests:
            return []
        began = time.monotonic()
        try:
            sent = self.broker.attempt(lambda: self._send(runs), anew=self._outage.error is None)
        except Exception as error:  # every broker has errors of its own
            self.broker.rest(began)
            self._outage.failed(error)
            return []
        self._outage.worked()
        return sent

    def _send(self, runs: Sequence[Run]) -> list[Run]:
        """Send what the broker takes: a message that it refuses does not hold up those of other windows."""
        sent: list[Run] = []
        with self.broker.producer() as producer, batched(producer):
            for run in runs:
                try:
                    self._send_one(run, producer)
                except Exception as error:
                    if self.broker.is_away(error):
                        raise
                    name = run.window.name
                    self._refused.setdefault(name, Outage(f"sending runs of window {name}", logger)).failed(error)
                else:
                    sent.append(run)
        for run in sent:
            if run.window.name in self._refused:
                self._refused[run.window.name].worked()
        return sent

    def _send_one(self, run: Run, producer: Any) -> None:
        definition = run.window.definition
        options: dict[str, Any] = {"task_id": run.task_id, "producer": producer, "retry": False, "ignore_result": True}
        task = self.app.tasks.get(definition.task)
        limit = getattr(task, "row_time_limit", None)
        if limit is not None:
            hard = run.window.max_run_time / 1000 + limit + self.settings.kill_grace
            options |= {"time_limit": hard, "soft_time_limit": hard - self.settings.kill_grace}
        if run.node:
            options["queue"] = node_queue(self.app, run.node)
        elif definition.queue:
            options["queue"] = definition.queue
        kwargs = {**definition.kwargs, "claim": run.message}
        if task is not None:
            task.apply_async(args=tuple(definition.args), kwargs=kwargs, **options)
        else:
            self.app.send_task(definition.task, args=definition.args, kwargs=kwargs, **options)

    # ---- maintenance

    def maintain(self, link: Link) -> None:
        """One round: mark what is over, send what was not sent, move what does not start."""
        maintain.end_overdue(link, self.statements)
        timeout = round(self.settings.accept_timeout * 1000)
        self.publish(maintain.resend(link, self.statements, self.rules, accept_timeout=timeout), link)

    def prune(self, link: Link, *, older_than_seconds: float | None = None, batches: int = 50) -> int:
        """Delete old runs in small batches; returns how many."""
        retention = self.settings.history_retention if older_than_seconds is None else older_than_seconds
        return maintain.prune(
            link,
            self.statements,
            retention=round(retention * 1000),
            max_rows=self.settings.history_max_rows,
            batches=batches,
        )

    def forget_nodes(self, link: Link, *, silent_seconds: float) -> list[str]:
        """Take nodes that have been silent for so long out of the register, and their queues out of the broker."""
        tables = own_tables(self.app).nodes
        names = registry.forget_silent(link, tables, silent_ms=round(silent_seconds * 1000))
        if names:
            with suppress(Exception), self.broker.connection() as connection:
                # Where queues expire it is gone already; a broker that cannot be reached keeps an empty one.
                channel: Any = connection.default_channel
                for name in names:
                    channel.queue_delete(identity.queue_of(name))
        return names

    # ---- what it stands on

    @property
    def database(self) -> Database:
        return database_for(self.app, "celery_claim's windows")

    @property
    def statements(self) -> WindowStatements:
        state = state_of(self.app)
        return state.once("window statements", lambda: WindowStatements(own_tables(self.app), self.database.dialect))

    @property
    def rules(self) -> Rules:
        return Rules(
            cap=self.settings.max_concurrency,
            node_timeout=round(self.settings.node_timeout * 1000),
            main_node=self.settings.main_node,
            log_empty_runs=self.settings.log_empty_runs,
            queue_of=self._queue_of,
        )

    def prepare(self) -> None:
        """Make the tables unless claim_create_tables is False; once in each process."""
        state_of(self.app).once("own tables", self._prepare)

    def _prepare(self) -> bool:
        if self.settings.create_tables:
            self.create_tables()
        return True

    def create_tables(self) -> list[str]:
        """Make celery_claim's own tables that do not exist; returns their names."""
        tables = own_tables(self.app)
        made = create_tables(self.database, tables)
        record_version(self.database, tables.nodes.version)
        return made

    def _queue_of(self, window: Window) -> str | None:
        if window.task not in self._routes:
            self._routes[window.task] = self._routed(window.task)
        return queue_of(window, self._routes, self.app.conf.task_default_queue)

    def _routed(self, task: str) -> str:
        """The queue that Celery sends a task to when nobody says otherwise."""
        registered = self.app.tasks.get(task)
        options = {"queue": queue} if (queue := getattr(registered, "queue", None)) else {}
        routed = self.app.amqp.router.route(options, task, (), {}).get("queue")
        return str(getattr(routed, "name", None) or routed or self.app.conf.task_default_queue)

    def _check(self, definition: Definition) -> None:
        cap = self.settings.max_concurrency
        for label in ("concurrency", "max_concurrency"):
            number = getattr(definition, label)
            if number is not None and number > cap:
                raise ConfigurationError(
                    f"window {definition.name}: {label}={number} is more than claim_max_concurrency={cap}"
                )

    def _adjusting(self, name: str) -> None:
        """Write a window that code declares and nobody has fired yet into the table."""
        if name not in self.look().windows:
            definitions = self.declared()
            if name in definitions:
                self.register({name: definitions[name]})

    def _tell(self, fires: Fires) -> None:
        """Log why a window has no runs, once until it has some again."""
        for name, outcome in fires.outcomes.items():
            reason = fires.reasons.get(name)
            if reason is not None and self._warned.get(name) != reason:
                self._warned[name] = reason
                logger.warning("window %s: %s", name, reason)
            elif outcome is Outcome.FIRED:
                self._warned.pop(name, None)

    @contextmanager
    def _linked(self) -> Iterator[Link]:
        self.prepare()
        with self.database.linked() as link:
            try:
                yield link
            except StatementRefused as error:
                missing = missing_tables(link, own_tables(self.app))
                if not missing:
                    raise
                raise ConfigurationError(
                    f"{self.database.name} has no table {', '.join(missing)}: run celery -A proj claim initdb, or "
                    "leave claim_create_tables at True"
                ) from error


def node_queue(app: Celery, node: str) -> Queue:
    """The queue that only this node consumes; declared alike by the node and by whoever sends to it.

    It goes through the default exchange: a binding of its own would outlive it. It expires when nobody consumes it,
    and its messages when nobody can use them any more.
    """
    from kombu import Exchange, Queue

    name = identity.queue_of(node)
    seconds = NODE_QUEUE_TIMEOUTS * state_of(app).settings.node_timeout
    return Queue(name, Exchange("", type="direct"), routing_key=name, expires=seconds, durable=True, auto_delete=False)


def _whoami() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
