"""Refuse to start a worker on tables, settings or windows that cannot work."""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps

from celery_claim.app import claim_tasks, state_of
from celery_claim.checking import check_windows
from celery_claim.exceptions import ClaimError, ConfigurationError

logger = logging.getLogger(__name__)

#: A worker that finds its configuration unusable ends with this code (sysexits.h: EX_CONFIG).
EXIT_CONFIGURATION = 78


class CheckStep(bootsteps.Step):
    """Refuses to start a worker on what cannot work; a database that is down may come back."""

    name = "claim-check"
    label = "claim check"

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        try:
            _create_tables(parent.app)
            findings = [(task.name, finding) for task in claim_tasks(parent.app) for finding in task.check()]
            findings += [("windows", finding) for finding in check_windows(parent.app)]
            refused = sum(_said(name, finding) for name, finding in findings) > 0
        except ConfigurationError as error:
            logger.critical("%s", error)
            refused = True
        if refused:
            raise SystemExit(EXIT_CONFIGURATION)


def _create_tables(app: Any) -> None:
    settings = state_of(app).settings
    if settings.database_url is None or not settings.create_tables or not any(claim_tasks(app)):
        return
    from celery_claim.dispatch import Dispatcher

    try:
        Dispatcher.of(app).prepare()
    except ClaimError as error:
        # Rows are claimed without them; windows say what they miss when they fire.
        logger.warning("celery_claim's own tables were not made: %s", error)


def _said(name: Any, finding: Any) -> bool:
    """Log what check finds; whether it is an error."""
    fatal: bool = finding.level == "error"
    logger.log(logging.CRITICAL if fatal else logging.WARNING, "%s: %s", name, finding)
    return fatal
