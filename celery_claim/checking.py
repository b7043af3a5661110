"""Check the tasks and windows of an app: what its tables, its server and its options would do at 3 a.m."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from celery_claim.app import claim_tasks, state_of
from celery_claim.claims.check import Finding, Task, check_claims, unavailable, unusable
from celery_claim.claims.table import Claims
from celery_claim.exceptions import ClaimError, ConfigurationError, DatabaseUnavailable

if TYPE_CHECKING:
    from celery import Celery

    from celery_claim.dispatch import Dispatcher
    from celery_claim.tasks import ClaimTask
    from celery_claim.windows.window import Definition

#: Schedulers that fire windows by themselves; the others hold plain intervals.
CLAIM_SCHEDULERS = ("claim", "celery_claim.beat:ClaimScheduler", "celery_claim.beat.ClaimScheduler")


def check_task(task: ClaimTask) -> list[Finding]:
    """What is wrong with a task's table, server and options; a database that cannot be asked is a finding too."""
    try:
        return check_claims(task.claims, _facts(task))
    except DatabaseUnavailable as error:
        return [unavailable(_table_name(task), error)]
    except ConfigurationError as error:
        return [unusable(_table_name(task), error)]


def check_windows(app: Celery, *, deployed: bool = False) -> list[Finding]:
    """What is wrong with the windows that an app declares; `deployed`: also with what runs, as the tables tell."""
    from celery_claim.dispatch import Dispatcher

    dispatcher = Dispatcher.of(app)
    try:
        definitions = dispatcher.declared()
    except ConfigurationError as error:
        return [Finding("error", "window-refused", "beat_schedule", str(error))]
    if not definitions:
        return []
    if dispatcher.settings.database_url is None:
        message = "windows are kept in the app's own database, and there is none"
        return [Finding("error", "no-database", "beat_schedule", message, "set claim_database_url")]
    findings = [finding for each in definitions.values() for finding in _of_window(app, each)]
    if deployed:
        findings += _of_deployment(dispatcher, definitions)
    return findings


def _of_window(app: Celery, definition: Definition) -> Iterator[Finding]:
    from celery_claim.tasks import ClaimTask

    name = f"window {definition.name}"
    task = app.tasks.get(definition.task)
    if task is None:
        yield Finding(
            "warning",
            "window-task-unknown",
            name,
            f"no task {definition.task!r} is registered here: a run that comes to this worker is discarded and missed",
            "import the module of the task (include= or imports=), or correct the name",
        )
    elif not isinstance(task, ClaimTask):
        yield Finding(
            "error",
            "window-task-kind",
            name,
            f"task {definition.task!r} consumes no table: a window's run would call it with an argument it has not",
            "give it base=ClaimTask, or schedule it as an ordinary entry",
        )
    if definition.frequency % 1000 and app.conf.beat_scheduler not in CLAIM_SCHEDULERS:
        yield Finding(
            "warning",
            "fractional-frequency",
            name,
            f"frequency={definition.frequency / 1000:g} is no whole number of seconds: schedulers that keep entries in "
            "a database round it",
            "celery beat -S claim (and beat_scheduler = 'claim'), or whole seconds",
        )


def _of_deployment(dispatcher: Dispatcher, definitions: dict[str, Definition]) -> Iterator[Finding]:
    try:
        look, nodes = dispatcher.look(), [node for node in dispatcher.nodes() if node["alive"]]
    except DatabaseUnavailable as error:
        yield unavailable("celery_claim's own tables", error)
        return
    except ClaimError as error:
        yield Finding("error", "no-own-tables", "celery_claim's own tables", str(error), "celery -A proj claim initdb")
        return
    for name in look.windows.keys() - definitions.keys():
        yield Finding(
            "warning",
            "window-not-declared",
            f"window {name}",
            "it stands in the table and in no beat_schedule here: nothing fires it but a beat with other code",
            f"celery -A proj claim prune --window {name}",
        )
    mains = [each.name for each in definitions.values() if each.run_type == "main"]
    if mains and not any(_is_main(dispatcher, node) for node in nodes):
        yield Finding(
            "warning",
            "no-main-node",
            f"window {mains[0]}",
            "no live node is the main node: its slots are missed",
            "celery -A proj worker --claim-role main, or set claim_main_node",
        )
    brokers = {node["broker_id"] for node in nodes if node["broker_id"]}
    if len(brokers) > 1:
        yield Finding(
            "error",
            "brokers-differ",
            "the register of nodes",
            f"live nodes talk to {len(brokers)} brokers and share one database: a run sent over one never reaches a "
            "node on another",
            "give the fleets databases, or claim_table_prefix, of their own",
        )


def _is_main(dispatcher: Dispatcher, node: dict[str, Any]) -> bool:
    fixed = dispatcher.settings.main_node
    return bool(node["node"] == fixed if fixed is not None else node["role"] == "main")


def _facts(task: ClaimTask) -> Task:
    return Task(
        name=str(task.name),
        lease_seconds=task.lease_seconds,
        max_retries=task.max_retries,
        max_reclaims=task.max_reclaims,
        transactional=task.transactional,
        skip_locked=task.skip_locked,
        siblings=dict(_siblings(task)),
        processes=task.app.conf.worker_concurrency or os.cpu_count() or 1,
        max_clock_skew=state_of(task.app).settings.max_clock_skew,
    )


def _siblings(task: ClaimTask) -> Iterator[tuple[str, int | None]]:
    """The other tasks of the app on the same table."""
    mine = task.claims
    for other in claim_tasks(task.app):
        if other is task:
            continue
        try:
            theirs: Claims = other.claims
        except ClaimError:  # its own check says so
            continue
        if (theirs.database.url, theirs.table.name) == (mine.database.url, mine.table.name):
            yield str(other.name), other.lease_seconds


def _table_name(task: ClaimTask) -> str:
    named = task.table or getattr(task.model, "__tablename__", None) or getattr(task.model, "name", None)
    return str(named or task.name)
