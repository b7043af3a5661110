"""Which answers of the server pass by themselves, and which will be the same tomorrow."""

from __future__ import annotations

import re
from typing import Any

import redis
from redis import exceptions
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from celery_claim.transport import forks


class WritesRefused(exceptions.ResponseError):
    """The server takes no writes for now: too few replicas, a disk that is full, a script that runs too long."""


#: What ends by itself, or when another server answers: Celery connects again instead of giving up.
PASSING = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    WritesRefused,
)

#: Error codes for which redis-py has no class, or which Redis 6.2 hides in the error of a script.
CODES: dict[str, type[exceptions.ResponseError]] = {
    "BUSY": WritesRefused,
    "MISCONF": WritesRefused,
    "NOREPLICAS": WritesRefused,
    "MASTERDOWN": exceptions.MasterDownError,
    "NOPERM": exceptions.NoPermissionError,
    "OOM": exceptions.OutOfMemoryError,
    "READONLY": exceptions.ReadOnlyError,
}
#: Redis 6.2: `ERR Error running script (call to f_...): @user_script:7: -READONLY You can't write ...`; redis-py
#: takes a code of its own off the front and leaves the others.
_IN_SCRIPT = re.compile(r"(?:Error running script .*?: -)?([A-Z]+) ")


def translated(error: exceptions.ResponseError) -> exceptions.ResponseError:
    """The same error in the class that says what it means."""
    found = _IN_SCRIPT.match(str(error))
    kind = CODES.get(found.group(1)) if found else None
    return error if kind is None or isinstance(error, kind) else kind(str(error))


class _Ours:
    """A connection whose errors have classes, so that Celery can tell a passing one by its type; children drop it."""

    def _connect(self) -> Any:
        sock = super()._connect()  # type: ignore[misc]
        forks.remember(sock)
        return sock

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)  # type: ignore[misc]
        except exceptions.ResponseError as error:
            better = translated(error)
            if better is error:
                raise
            raise better from None


class Connection(_Ours, redis.Connection):
    """TCP."""


class SSLConnection(_Ours, redis.SSLConnection):
    """TLS."""


class UnixDomainSocketConnection(_Ours, redis.UnixDomainSocketConnection):
    """A socket file."""


class MasterConnection(_Ours, SentinelManagedConnection):
    """TCP to the master that the sentinels name."""


class SSLMasterConnection(_Ours, SentinelManagedSSLConnection):
    """TLS to the master that the sentinels name."""
