"""Look at a server before it is used: say what is wrong with it in a sentence, instead of failing later."""

from __future__ import annotations

import logging
import ssl
from typing import Any, NoReturn

import redis
from redis import exceptions
from redis.sentinel import MasterNotFoundError

from celery_claim.exceptions import ConfigurationError
from celery_claim.streams.wire.keys import Keys
from celery_claim.transport.connect import parameters, place_of, sentinels

logger = logging.getLogger("celery_claim.streams")

#: Every command that we send or that our scripts call -> its words, with the probe's key at `K`. They are only
#: queued in a transaction that is discarded: a server checks the permission before it queues.
NEEDED: dict[str, str] = {
    "client|id": "CLIENT ID",
    "del": "DEL K",
    "discard": "",
    "eval": "EVAL return 0",
    "evalsha": "EVALSHA 0 0",
    "exists": "EXISTS K",
    "hdel": "HDEL K f",
    "hget": "HGET K f",
    "hmget": "HMGET K f",
    "hset": "HSET K f v",
    "multi": "",
    "pexpire": "PEXPIRE K 1",
    "ping": "PING",
    "sadd": "SADD K m",
    "script|load": "SCRIPT LOAD return",
    "sismember": "SISMEMBER K m",
    "srem": "SREM K m",
    "time": "TIME",
    "xack": "XACK K g 0-1",
    "xadd": "XADD K * f v",
    "xclaim": "XCLAIM K g c 0 0-1",
    "xdel": "XDEL K 0-1",
    "xgroup|create": "XGROUP CREATE K g 0",
    "xgroup|createconsumer": "XGROUP CREATECONSUMER K g c",
    "xgroup|delconsumer": "XGROUP DELCONSUMER K g c",
    "xinfo|consumers": "XINFO CONSUMERS K g",
    "xinfo|groups": "XINFO GROUPS K",
    "xlen": "XLEN K",
    "xpending": "XPENDING K g",
    "xrange": "XRANGE K - +",
    "xread": "XREAD STREAMS K 0",
    "xreadgroup": "XREADGROUP GROUP g c STREAMS K >",
    "xrevrange": "XREVRANGE K + -",
    "zadd": "ZADD K 0 m",
    "zcard": "ZCARD K",
    "zrange": "ZRANGE K 0 0",
    "zrangebyscore": "ZRANGEBYSCORE K 0 0",
    "zrem": "ZREM K m",
}

#: Commands that are asked for and not missed: they end a waiting read early, tell connections apart, find settings that
#: lose tasks, and choose a database other than 0.
WELCOME = ("client|list", "client|setinfo", "client|setname", "client|unblock", "info", "select")

#: How OpenSSL names an answer that is not TLS.
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
#: Servers and users that worked in this process: what is refused later may be a password that is being changed.
_used: set[tuple[str, str]] = set()


def check_server(client: Any, conninfo: Any, keys: Keys) -> None:
    """Raise ConfigurationError for a server that cannot serve us, and what passes as the redis error that it is."""
    place = place_of(conninfo)
    try:
        client.ping()
        facts = _facts(client)
        _check_role(facts, place)
        _check_capabilities(client, keys, place)
        _check_permissions(client, conninfo, keys, place)
    except (exceptions.AuthenticationError, exceptions.AuthorizationError) as error:
        _refuse(conninfo, _login(conninfo, place, error), exceptions.AuthenticationError)
    except exceptions.NoPermissionError as error:
        _refuse(conninfo, f"{place} refuses {_who(conninfo)}: {error}", exceptions.AuthorizationError)
    except (exceptions.MovedError, exceptions.ClusterCrossSlotError, exceptions.ClusterDownError) as error:
        if not isinstance(error, exceptions.MasterDownError):
            _refuse_cluster(place)
        raise
    except MasterNotFoundError:
        _explain_sentinels(conninfo, place)
    except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
        _explain_tls(conninfo, error, place)
        raise
    except exceptions.ResponseError as error:
        if "DB index is out of range" in str(error):
            raise ConfigurationError(f"{place}: the server has no database of that number") from None
        raise
    if (place, _user(conninfo)) not in _used:
        _used.add((place, _user(conninfo)))
        _warn_of_eviction(client, place)


def _refuse(conninfo: Any, message: str, passing: type[exceptions.ConnectionError]) -> NoReturn:
    """A fault that was there from the beginning ends the program; a running worker waits for it to be put right."""
    if (place_of(conninfo), _user(conninfo)) in _used:
        raise passing(message) from None
    raise ConfigurationError(message) from None


# ---- who answers ----------------------------------------------------------------------------------------------


def _facts(client: Any) -> dict[str, str]:
    """What HELLO tells of the server: it may be asked by every user. Nothing, where it is not known."""
    try:
        reply = client.execute_command("HELLO")
    except exceptions.ResponseError as error:
        if "unknown command" in str(error).lower():
            return {}
        raise
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=False)
    return {_text(name): _text(value) for name, value in pairs}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _check_role(facts: dict[str, str], place: str) -> None:
    if facts.get("mode") == "cluster":
        _refuse_cluster(place)
    if facts.get("mode") == "sentinel":
        raise ConfigurationError(
            f"{place} is a Sentinel: the broker URL begins with sentinel-streams://, and "
            "broker_transport_options has 'master_name'"
        )
    if facts.get("role") in ("replica", "slave"):
        # It passes: a failover may make this server the master again.
        raise exceptions.ReadOnlyError(
            f"{place} is a replica, which takes no messages: connect to its master, or through sentinel-streams://"
        )


def _refuse_cluster(place: str) -> NoReturn:
    raise ConfigurationError(
        f"{place} is part of a Redis Cluster, which redis-streams:// does not support yet: use one server, or several "
        "with Sentinel"
    ) from None


def _check_capabilities(client: Any, keys: Keys, place: str) -> None:
    """Redis 6.2 is the first that finds abandoned messages by their idle time; forks have versions of their own."""
    try:
        client.execute_command("XPENDING", _probe(keys), "celery", "IDLE", 1, "-", "+", 1)
    except exceptions.NoPermissionError:
        return
    except exceptions.ResponseError as error:
        text = str(error)
        if any(sign in text for sign in ("unknown command", "syntax error", "not an integer", "Invalid stream ID")):
            raise ConfigurationError(
                f"{place} is too old for redis-streams://: it does not know XPENDING ... IDLE. Redis >= 6.2 and "
                "Valkey >= 8 do"
            ) from None
        if "NOGROUP" not in text:
            raise


def _warn_of_eviction(client: Any, place: str) -> None:
    try:
        policy = _text(client.info("memory").get("maxmemory_policy", "noeviction"))
    except exceptions.NoPermissionError as error:
        logger.debug("the eviction policy of %s is not known: %s", place, error)
        return
    if policy != "noeviction":
        logger.warning(
            "%s has maxmemory-policy %s: when its memory is full it throws queues away, with their tasks. "
            "Set maxmemory-policy to noeviction",
            place,
            policy,
        )


def _probe(keys: Keys) -> str:
    """A key that nobody has, under our names: a user's permissions may end at our prefix."""
    return keys.exchanges + ":probe"


# ---- what the user may do -------------------------------------------------------------------------------------


def _check_permissions(client: Any, conninfo: Any, keys: Keys, place: str) -> None:
    missing, keys_refused = missing_permissions(client, keys)
    if not missing and not keys_refused:
        return
    rules = " ".join([f"~{keys.prefix}cs1:*", *(f"+{name}" for name in NEEDED)])
    parts = [f"run {', '.join(missing)}"] if missing else []
    parts += [f"use keys that begin with {keys.prefix}cs1:"] if keys_refused else []
    message = f"{_who(conninfo)} at {place} may not {' and may not '.join(parts)}. What it needs: {rules}"
    _refuse(conninfo, message, exceptions.AuthorizationError)


def missing_permissions(client: Any, keys: Keys) -> tuple[list[str], bool]:
    """The commands of NEEDED that the user may not run, and whether it may not use our keys."""
    probe = redis.Redis(connection_pool=client.connection_pool)
    # The replies are all QUEUED, which no command's own reply is.
    probe.response_callbacks.clear()
    refused = [name for name, reply in zip(("multi", "discard"), _answers(probe, []), strict=True) if _is_noperm(reply)]
    if refused:
        # Without a transaction the others would be carried out.
        return refused, False
    key = _probe(keys)
    asked = {name: [key if word == "K" else word for word in words.split()] for name, words in NEEDED.items() if words}
    replies = _answers(probe, list(asked.values()))[1:-1]
    missing, keys_refused = [], False
    for name, reply in zip(asked, replies, strict=True):
        if _is_noperm(reply):
            about_keys = "access" in str(reply) and "key" in str(reply)
            keys_refused = keys_refused or about_keys
            if not about_keys:
                missing.append(name)
    return missing, keys_refused


def _answers(client: Any, commands: list[list[str]]) -> list[Any]:
    with client.pipeline(transaction=False) as pipe:
        for words in [["MULTI"], *commands, ["DISCARD"]]:
            pipe.execute_command(*words)
        return list(pipe.execute(raise_on_error=False))


def _is_noperm(reply: Any) -> bool:
    return isinstance(reply, exceptions.NoPermissionError)


# ---- in words -------------------------------------------------------------------------------------------------


def _who(conninfo: Any) -> str:
    return f"user {_user(conninfo)!r}"


def _user(conninfo: Any) -> str:
    return str(parameters(conninfo).get("username") or "default")


def _login(conninfo: Any, place: str, error: Exception) -> str:
    if "NOAUTH" in str(error) or "required" in str(error).lower() or "must be called" in str(error):
        return f"{place} asks for a password, and the broker URL has none: redis-streams://user:password@host:6379/0"
    if "without any password configured" in str(error) or "no password is set" in str(error):
        return f"{place} has no password for {_who(conninfo)}, and the broker URL has one: leave it out"
    return f"{place} refuses the password of {_who(conninfo)}: correct it in broker_url"


def _explain_tls(conninfo: Any, error: Exception, place: str) -> None:
    """Say what encryption has to do with it: redis-py wraps it in an error of the connection."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        raise ConfigurationError(
            f"the certificate of {place} is not accepted ({cause.verify_message}): name its authority with "
            "ssl_ca_certs, or turn verification off with ssl_cert_reqs=none"
        ) from None
    encrypted = parameters(conninfo).get("ssl", False)
    if encrypted and isinstance(cause, ssl.SSLError) and cause.reason in NO_TLS:
        raise ConfigurationError(f"{place} does not speak TLS: use redis-streams://, or its port for TLS") from None
    # Neither side says so when only one of them encrypts: one waits, or the other closes the connection.
    if encrypted and isinstance(error, exceptions.TimeoutError):
        raise exceptions.TimeoutError(f"{place} does not answer; if it does not speak TLS, use redis-streams://")
    if not encrypted and any(sign in str(error) for sign in ("closed by server", "Connection reset")):
        raise exceptions.ConnectionError(
            f"{place} closed the connection at the first command; if it speaks TLS, use rediss-streams:// ({error})"
        )


def _explain_sentinels(conninfo: Any, place: str) -> NoReturn:
    """No master: wait for one, unless every sentinel that answers says that there will be none."""
    answers = [_ask_sentinel(sentinel) for sentinel in sentinels(conninfo).sentinels]
    reached = [answer for answer in answers if answer is not None]
    wanted = conninfo.transport_options["master_name"]
    refused = [answer for answer in reached if isinstance(answer, str)]
    known = sorted({name for answer in reached if not isinstance(answer, str) for name in answer})
    if reached and len(refused) == len(reached):
        _refuse(conninfo, f"{place}: {refused[0]}; give the password of the sentinels in the transport option "
                "'sentinel_kwargs': {'password': ...}", exceptions.AuthenticationError)  # fmt: skip
    if reached and not refused and wanted not in known:
        _refuse(conninfo, f"the transport option 'master_name' is {wanted!r}; the sentinels of {place} know "
                f"{', '.join(known) or 'no master'}", exceptions.AuthenticationError)  # fmt: skip
    if not reached:
        raise exceptions.ConnectionError(f"{place}: none of them answers") from None
    raise exceptions.ConnectionError(f"{place}: they name no master at this time") from None


def _ask_sentinel(sentinel: Any) -> list[str] | str | None:
    """The masters that a sentinel knows, why it does not say, or None when it does not answer."""
    try:
        return [_text(name) for name in sentinel.sentinel_masters()]
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        return f"the sentinels refuse us ({error})"
    except (exceptions.ConnectionError, exceptions.TimeoutError):
        return None
