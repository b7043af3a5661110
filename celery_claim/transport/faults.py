"""Which answers of the server pass by themselves, and which will be the same tomorrow."""

from __future__ import annotations

import re
from typing import Any

import redis
from redis import exceptions
from redis.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from celery_claim.exceptions import ConfigurationError
from celery_claim.streams.wire.keys import LAYOUT
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
#: takes a code of its own off the front and leaves the others. An error that the script caught and returned has only
#: the second half: `@user_script: 7: -OOM command not allowed ...`.
_IN_SCRIPT = re.compile(r"(?:(?:Error running script .*?|@user_script: ?\d+): -)?([A-Z]+) ")


#: What redis-py leaves of it names no remedy, and not even the error's code.
FULL = (
    "OOM: the Redis server is at its maxmemory and takes nothing new; what it holds is kept. Let workers empty the "
    "queues, or raise maxmemory"
)


def translated(error: exceptions.ResponseError) -> exceptions.ResponseError:
    """The same error in the class, and the words, that say what it means."""
    found = _IN_SCRIPT.match(str(error))
    kind = CODES.get(found.group(1)) if found else None
    if "UNBLOCKED force unblock" in str(error):
        # What ends a blocked read when its server becomes a replica; a stream that was deleted ends it otherwise.
        kind = exceptions.ReadOnlyError
    if kind is exceptions.OutOfMemoryError or isinstance(error, exceptions.OutOfMemoryError):
        return exceptions.OutOfMemoryError(FULL)
    return error if kind is None or isinstance(error, kind) else kind(str(error))


class Client(redis.Redis):
    """A client that says which key is in the way when a command meets one of another type."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except exceptions.ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            self._name_the_key(args)
            raise

    def _name_the_key(self, args: tuple[Any, ...]) -> None:
        names = args[3 : 3 + int(args[2])] if args[0] in ("EVAL", "EVALSHA") else args[1:]
        for key in (str(name) for name in names if LAYOUT in str(name)):
            found = super().execute_command("TYPE", key)  # type: ignore[no-untyped-call]
            found = found.decode() if isinstance(found, bytes) else found
            if found not in ("none", type_of(key)):
                raise ConfigurationError(
                    f"key {key!r} is a {found}, and the broker keeps a {type_of(key)} there: rename that key, or give "
                    "the broker keys of its own with the transport option 'global_keyprefix'"
                ) from None


def type_of(key: str) -> str:
    """What we keep under a name of ours."""
    name = key.split(LAYOUT, 1)[1]
    if name.startswith("bind:") or name.endswith(":eta"):
        return "zset"
    if name == "exchanges" or name.endswith((":meta", ":etam")):
        return "hash"
    return "set" if name == "queues" else "stream"


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
