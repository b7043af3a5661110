"""Redis clients for a broker URL: TCP, TLS, unix socket, Sentinel."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import unquote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_claim.exceptions import ConfigurationError
from celery_claim.streams.options import CONNECTION_OPTIONS

#: Seconds within which a command must be answered, so that a half-open connection is noticed.
COMMAND_TIMEOUT = 30.0
CONNECT_TIMEOUT = 5.0


def parameters(conninfo: Any) -> dict[str, Any]:
    """redis-py connection arguments for a kombu connection."""
    options = conninfo.transport_options
    arguments: dict[str, Any] = {
        # One protocol, so that the shape of replies does not depend on the client's version.
        "protocol": 2,
        # A repeated XADD would be a second message.
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": COMMAND_TIMEOUT,
        "socket_connect_timeout": CONNECT_TIMEOUT,
        "socket_keepalive": True,
        "username": conninfo.userid or None,
        "password": conninfo.password or None,
    }
    arguments.update({
        name: value for name, value in options.items()
        if name in CONNECTION_OPTIONS - {"ssl", "master_name", "sentinel_kwargs", "min_other_sentinels"}
    })  # fmt: skip
    host = conninfo.hostname or "localhost"
    if host.startswith("socket://"):
        arguments["path"] = "/" + unquote(host[len("socket://") :].partition("?")[0].lstrip("/"))
        arguments["db"] = 0
    else:
        arguments.update(host=host, port=conninfo.port or 6379, db=_database(conninfo.virtual_host))
    secure = conninfo.ssl or options.get("ssl") or (conninfo.transport_cls or "").startswith("rediss")
    if secure:
        chosen = secure if isinstance(secure, dict) else {}
        arguments.update({"ssl": True, "ssl_cert_reqs": ssl.CERT_REQUIRED, **chosen})
    return arguments


def _database(virtual_host: Any) -> int:
    text = str(virtual_host or "0").strip("/") or "0"
    if not text.isdigit():
        raise ConfigurationError(f"the database of a redis-streams:// URL is a number, not {text!r}")
    return int(text)


def connect(conninfo: Any, *, single: bool = False, timeout: float | None = None) -> Any:
    """A client that opens its connections when first used; `single` has one connection of its own."""
    arguments = parameters(conninfo)
    if timeout is not None:
        arguments["socket_timeout"] = timeout
    if single:
        arguments["max_connections"] = 1
    if (conninfo.transport_cls or "").startswith("sentinel"):
        return _through_sentinel(conninfo, arguments)
    if "path" in arguments:
        for name in ("socket_connect_timeout", "socket_keepalive", "ssl", "ssl_cert_reqs"):
            arguments.pop(name, None)
        kind: Any = redis.UnixDomainSocketConnection
    elif arguments.pop("ssl", False):
        kind = redis.SSLConnection
    else:
        kind = redis.Connection
    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=kind, **arguments))


def _through_sentinel(conninfo: Any, arguments: dict[str, Any]) -> Any:
    options = conninfo.transport_options
    master = options.get("master_name")
    if not master:
        raise ConfigurationError("sentinel-streams:// needs the transport option 'master_name'")
    places = []
    for url in conninfo.alt or [f"sentinel-streams://{arguments['host']}:{arguments['port']}"]:
        place = url.split("://", 1)[-1].split("/", 1)[0].rpartition("@")[2]
        host, _, port = place.partition(":")
        places.append((host or "localhost", int(port or 26379)))
    for name in ("host", "port"):
        arguments.pop(name)
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        places,
        min_other_sentinels=options.get("min_other_sentinels", 0),
        sentinel_kwargs=options.get("sentinel_kwargs"),
        **arguments,
    )
    return sentinel.master_for(master, redis.Redis)  # type: ignore[no-untyped-call]
