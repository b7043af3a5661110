"""Check a task of an app: what its table, its server and its options would do at 3 a.m."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from celery_claim.app import claim_tasks, state_of
from celery_claim.claims.check import Finding, Task, check_claims, unavailable, unusable
from celery_claim.claims.table import Claims
from celery_claim.exceptions import ClaimError, ConfigurationError, DatabaseUnavailable

if TYPE_CHECKING:
    from celery_claim.tasks import ClaimTask


def check_task(task: ClaimTask) -> list[Finding]:
    """What is wrong with a task's table, server and options; a database that cannot be asked is a finding too."""
    try:
        return check_claims(task.claims, _facts(task))
    except DatabaseUnavailable as error:
        return [unavailable(_table_name(task), error)]
    except ConfigurationError as error:
        return [unusable(_table_name(task), error)]


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
