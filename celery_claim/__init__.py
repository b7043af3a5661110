"""Rows of a table as a queue for Celery workers: claimed without a race, recovered after a crash.

row -> claim -> process -> write back (recover)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from celery_claim import autoload as _autoload  # noqa: F401  a broker URL of ours must work after this import
from celery_claim.version import __version__ as __version__

if TYPE_CHECKING:
    from celery_claim.app import setup
    from celery_claim.claims.check import Finding
    from celery_claim.claims.sql.columns import Claimable
    from celery_claim.exceptions import ClaimError, ClaimLost
    from celery_claim.rows.outcomes import Done, Fail, Retry, Skip
    from celery_claim.rows.report import Counts
    from celery_claim.schedules import window
    from celery_claim.states import Status
    from celery_claim.tasks import ClaimTask
    from celery_claim.transport.bulk import bulk

#: Imported when first asked for: every `celery` command imports this package, and few of them need SQLAlchemy.
_HOMES = {
    "ClaimError": "exceptions",
    "ClaimLost": "exceptions",
    "ClaimTask": "tasks",
    "Claimable": "claims.sql.columns",
    "Counts": "rows.report",
    "Done": "rows.outcomes",
    "Fail": "rows.outcomes",
    "Finding": "claims.check",
    "Retry": "rows.outcomes",
    "Skip": "rows.outcomes",
    "Status": "states",
    "bulk": "transport.bulk",
    "setup": "app",
    "window": "schedules",
}

__all__ = [
    "ClaimError",
    "ClaimLost",
    "ClaimTask",
    "Claimable",
    "Counts",
    "Done",
    "Fail",
    "Finding",
    "Retry",
    "Skip",
    "Status",
    "bulk",
    "setup",
    "window",
]


def __getattr__(name: str) -> Any:
    try:
        home = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
