"""All that differs between MySQL, MariaDB, PostgreSQL and SQLite; nothing else asks which of them it talks to."""

from __future__ import annotations

from collections.abc import Mapping

from celery_claim.dialects.dialect import LOCK_WAIT_SECONDS, Dialect, Fault, epoch_milliseconds, epoch_seconds
from celery_claim.dialects.mysql import MySQL
from celery_claim.dialects.postgresql import PostgreSQL
from celery_claim.dialects.sqlite import SQLite
from celery_claim.exceptions import ConfigurationError

__all__ = [
    "LOCK_WAIT_SECONDS",
    "Dialect",
    "Fault",
    "dialect_of",
    "epoch_milliseconds",
    "epoch_seconds",
    "fault_of",
]

_KINDS: Mapping[str, type[Dialect]] = {
    "mysql": MySQL,
    "mariadb": MySQL,
    "postgresql": PostgreSQL,
    "sqlite": SQLite,
}


def dialect_of(name: str) -> Dialect:
    """The dialect by SQLAlchemy's name for it. Raises ConfigurationError for a database that is not supported."""
    try:
        return _KINDS[name](name)
    except KeyError:
        raise ConfigurationError(
            f"database {name!r} is not supported; expected one of {', '.join(sorted(_KINDS))}"
        ) from None


def fault_of(error: BaseException) -> Fault | None:
    """What an exception of any driver, or of SQLAlchemy around one, means; None for every other exception."""
    if getattr(error, "connection_invalidated", False):
        return Fault.LOST
    origin = getattr(error, "orig", None) or error
    for kind in (MySQL, PostgreSQL, SQLite):
        fault = kind(kind.__name__).fault(origin)
        if fault is not None:
            return fault
    return None
