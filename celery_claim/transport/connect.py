"""Redis clients for a broker URL: TCP, TLS, unix socket, Sentinel."""

from __future__ import annotations

import inspect
import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import redis
from kombu.utils.imports import symbol_by_name
from kombu.utils.url import url_to_parts
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_claim.autoload import SCHEMES
from celery_claim.exceptions import ConfigurationError, did_you_mean
from celery_claim.transport import faults

#: Seconds within which a command must be answered, so that a half-open connection is noticed.
COMMAND_TIMEOUT = 30.0
CONNECT_TIMEOUT = 5.0
#: Seconds that a connection may be unused before it is tried with a PING.
HEALTH_CHECK_INTERVAL = 25.0
REDIS_PORT, SENTINEL_PORT = 6379, 26379

#: Transport options that redis-py's connections take as they are.
PASSED_ON = (
    "socket_timeout", "socket_connect_timeout", "socket_keepalive", "socket_keepalive_options", "health_check_interval",
    "client_name", "username", "password", "max_connections",
)  # fmt: skip
#: What redis-py's TLS connections know.
SSL_OPTIONS = frozenset(name for name in inspect.signature(redis.SSLConnection).parameters if name.startswith("ssl_"))
SSL_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
CERT_REQS = {"required": ssl.CERT_REQUIRED, "optional": ssl.CERT_OPTIONAL, "none": ssl.CERT_NONE}


def connect(conninfo: Any, *, single: bool = False, timeout: float | None = None) -> Any:
    """A client that opens its connections when first used; `single` has one connection of its own."""
    arguments = parameters(conninfo)
    if timeout is not None:
        arguments["socket_timeout"] = timeout
    if single:
        arguments["max_connections"] = 1
        # It reads all the time: `timeout` notices a dead server, and a PING would only be one more command.
        arguments["health_check_interval"] = 0
    if is_sentinel(conninfo):
        return _through_sentinel(conninfo, arguments)
    if "path" in arguments:
        kind: Any = faults.UnixDomainSocketConnection
    else:
        kind = faults.SSLConnection if arguments.pop("ssl") else faults.Connection
    return faults.Client(connection_pool=redis.ConnectionPool(connection_class=kind, **arguments))


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
        "health_check_interval": HEALTH_CHECK_INTERVAL,
        **{name: options[name] for name in PASSED_ON if options.get(name) is not None},
        **_place(conninfo),
    }
    if "path" in arguments:
        for name in ("socket_connect_timeout", "socket_keepalive", "socket_keepalive_options"):
            arguments.pop(name, None)
    else:
        arguments.update(_encryption(conninfo))
    provider = arguments.pop("credential_provider", None) or options.get("credential_provider")
    if provider is not None:
        arguments["credential_provider"] = _credentials(provider)
        for name in ("username", "password"):
            arguments.pop(name, None)
    return arguments


def place_of(conninfo: Any) -> str:
    """Where the server is, in words that hold no password."""
    where = _place(conninfo)
    if is_sentinel(conninfo):
        sentinels = ", ".join(f"{host}:{port}" for host, port in _sentinels(conninfo))
        return f"{_master_name(conninfo)} of the sentinels {sentinels}"
    return str(where["path"]) if "path" in where else f"{where['host']}:{where['port']}/{where['db']}"


def is_sentinel(conninfo: Any) -> bool:
    return str(conninfo.transport_cls).startswith("sentinel")


# ---- where the server is --------------------------------------------------------------------------------------


def _place(conninfo: Any) -> dict[str, Any]:
    """Address, database and credentials; of a socket URL they are in `hostname`, which kombu leaves alone."""
    host = conninfo.hostname or ""
    if host.startswith("socket://"):
        return _socket(host)
    where: dict[str, Any] = {"credential_provider": getattr(conninfo, "credential_provider", None)}
    who = {"username": conninfo.userid, "password": conninfo.password}
    if str(conninfo.transport_cls).endswith("+socket"):
        # Reached by failover: kombu has then parsed the URL, and the path is where a database is otherwise.
        where.update(path=_socket_path(conninfo.virtual_host), db=0)
    else:
        # After failover to `b:6380`, written without a scheme, the port is still in the name.
        name, _, port = host.partition(":") if host.count(":") == 1 else (host, "", "")
        where.update(host=name or "localhost", port=int(port or conninfo.port or REDIS_PORT))
        where["db"] = database(conninfo.virtual_host)
    if is_sentinel(conninfo):
        _complete(who, where, conninfo)
    return {name: value for name, value in {**where, **who}.items() if value is not None and value != ""}


def _complete(who: dict[str, Any], where: dict[str, Any], conninfo: Any) -> None:
    """All URLs of a Sentinel list lead to one master: what only one of them says holds for each."""
    for url in conninfo.alt or ():
        parts = url_to_parts(url) if "://" in url else None
        if parts is not None:
            who["username"] = who["username"] or parts.username
            who["password"] = who["password"] or parts.password
            where["db"] = where["db"] or database(parts.path)


def _socket(url: str) -> dict[str, Any]:
    parts = url_to_parts(url)
    if parts.hostname:
        raise ConfigurationError(
            "the broker URL of a unix socket has three slashes before the path: redis-streams+socket:///run/redis.sock"
        )
    query = dict(parts.query or {})
    db = database(query.pop("virtual_host", None) or query.pop("db", None))
    provider = query.pop("credential_provider", None)
    for name in query:
        raise ConfigurationError(
            f"unknown parameter {name!r} in the broker URL of a unix socket; it may have virtual_host and "
            f"credential_provider, and the rest goes to broker_transport_options"
        )
    where = {"path": _socket_path(parts.path), "db": db, "credential_provider": provider}
    who = {"username": parts.username, "password": parts.password}
    return {name: value for name, value in {**where, **who}.items() if value is not None and value != ""}


def _socket_path(path: Any) -> str:
    if not path:
        raise ConfigurationError(
            "the broker URL of a unix socket names no path: redis-streams+socket:///run/redis.sock"
        )
    return "/" + str(path).lstrip("/")


def database(virtual_host: Any) -> int:
    """The number of a database from the path of a URL."""
    text = str(virtual_host or "0").strip("/") or "0"
    if not text.isdigit():
        # With an @ it is the rest of a password that was not percent-encoded.
        shown = "" if "@" in text else f", not {text!r}"
        raise ConfigurationError(
            f"the database at the end of the broker URL is a number{shown}; characters such as / : @ # in a password "
            "are written percent-encoded"
        )
    return int(text)


def _credentials(provider: Any) -> CredentialProvider:
    given = symbol_by_name(provider)() if isinstance(provider, str) else provider
    if not isinstance(given, CredentialProvider):
        raise ConfigurationError(
            f"'credential_provider' is a {type(given).__name__}; it must be a redis.CredentialProvider or the dotted "
            "name of such a class"
        )
    return given


# ---- TLS ------------------------------------------------------------------------------------------------------


def _encryption(conninfo: Any) -> dict[str, Any]:
    """TLS by the scheme, by `broker_use_ssl` or by the URL's query; certificates are verified unless told not to."""
    options = conninfo.transport_options
    given: dict[str, Any] = {name: value for name, value in options.items() if name.startswith("ssl_")}
    for source in (options.get("ssl"), conninfo.ssl):
        if isinstance(source, Mapping):
            given.update(source)
    if not (conninfo.ssl or options.get("ssl") or str(conninfo.transport_cls).startswith("rediss")):
        for name in given:
            raise ConfigurationError(
                f"{name!r} is given, but the connection is not encrypted: use rediss-streams://, or broker_use_ssl "
                "with sentinel-streams://"
            )
        return {"ssl": False}
    for name, value in given.items():
        _check_ssl_option(name, value)
    reqs = given.get("ssl_cert_reqs", ssl.CERT_REQUIRED)
    if isinstance(reqs, str):
        reqs = CERT_REQS[reqs.lower().removeprefix("cert_")]
    reqs = ssl.CERT_NONE if reqs is None else reqs
    # Said in both cases, for the default is not the same in all versions of redis-py.
    checked = {"ssl_check_hostname": reqs != ssl.CERT_NONE, **given, "ssl_cert_reqs": reqs}
    return {"ssl": True, **checked}


def _check_ssl_option(name: str, value: Any) -> None:
    if name not in SSL_OPTIONS:
        raise ConfigurationError(f"unknown TLS option {name!r}.{did_you_mean(name, SSL_OPTIONS)}")
    if name in SSL_FILES and value is not None and not os.path.exists(value):
        raise ConfigurationError(f"{name!r} is {value!r}, which does not exist")
    if name == "ssl_cert_reqs":
        known = value.lower().removeprefix("cert_") in CERT_REQS if isinstance(value, str) else value in _CERT_MODES
        if not known:
            raise ConfigurationError(f"'ssl_cert_reqs' is {value!r}; it is 'required', 'optional' or 'none'")


_CERT_MODES = (None, *CERT_REQS.values())


# ---- Sentinel -------------------------------------------------------------------------------------------------


def sentinels(conninfo: Any) -> Any:
    """redis-py's Sentinel for a kombu connection: knows the sentinels, and asks them for the master."""
    return _through_sentinel(conninfo, parameters(conninfo)).connection_pool.sentinel_manager


def _through_sentinel(conninfo: Any, arguments: dict[str, Any]) -> Any:
    options = conninfo.transport_options
    for name in ("host", "port"):
        arguments.pop(name)
    kind = faults.SSLMasterConnection if arguments.pop("ssl") else faults.MasterConnection
    answer_in = arguments["socket_connect_timeout"]
    manager = Sentinel(  # type: ignore[no-untyped-call]
        _sentinels(conninfo),
        min_other_sentinels=options.get("min_other_sentinels", 0),
        sentinel_kwargs={
            "socket_timeout": answer_in,
            "socket_connect_timeout": answer_in,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            **(options.get("sentinel_kwargs") or {}),
        },
    )
    return manager.master_for(  # type: ignore[no-untyped-call]
        _master_name(conninfo), faults.Client, connection_class=kind, **arguments
    )


def _master_name(conninfo: Any) -> str:
    name = conninfo.transport_options.get("master_name")
    if not name:
        raise ConfigurationError(
            "sentinel-streams:// needs the name of the master that the sentinels watch: "
            "broker_transport_options = {'master_name': 'mymaster'}"
        )
    return str(name)


def _sentinels(conninfo: Any) -> list[tuple[str, int]]:
    urls = conninfo.alt or [f"//{conninfo.hostname or 'localhost'}:{conninfo.port or SENTINEL_PORT}"]
    places = []
    for url in urls:
        parts = urlsplit(url if "//" in url else f"//{url}")
        places.append((parts.hostname or "localhost", parts.port or SENTINEL_PORT))
    return places


# ---- what kombu makes of a URL --------------------------------------------------------------------------------


def check_urls(conninfo: Any) -> None:
    """Refuse a failover list that would leave our transport: kombu chooses it anew by each URL's scheme."""
    for url in conninfo.alt or ():
        scheme = url.split("://", 1)[0] if "://" in url else None
        if scheme is not None and scheme not in SCHEMES:
            raise ConfigurationError(
                f"an alternate broker URL begins with {scheme}://; after a failover kombu would use its own transport "
                f"for it, and messages would go where no worker of this one looks: write {_ours(scheme)}:// in each"
            )
        if scheme is not None and scheme.endswith("+socket") and "?" in url:
            raise ConfigurationError("an alternate broker URL of a unix socket cannot have parameters after a '?'")


def _ours(scheme: str) -> str:
    return {"rediss": "rediss-streams", "sentinel": "sentinel-streams"}.get(scheme, "redis-streams")
