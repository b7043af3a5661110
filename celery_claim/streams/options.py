"""The transport options of Redis Streams, each with its default and its unit."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from celery_claim.exceptions import ConfigurationError, did_you_mean

logger = logging.getLogger("celery_claim.streams")


@dataclass(frozen=True)
class StreamOptions:
    """How messages are held, given back and delayed."""

    #: Seconds without a sign of life after which a worker's messages go to another worker.
    lease_timeout: float = 60.0
    #: Seconds between two renewals of what a worker holds. None is a quarter of the lease.
    lease_renew_interval: float = None  # type: ignore[assignment]  # __post_init__ sets it
    #: Seconds after a connect before a consumer takes over others' messages. None is half of the lease: two renewals
    #: of any live owner, so that after an outage nobody loses what it is still reconnecting for.
    recovery_grace: float = None  # type: ignore[assignment]  # __post_init__ sets it
    #: Seconds between two looks for messages of workers that are gone; jitter shortens it by up to a fifth. None is a
    #: quarter of the lease.
    recovery_interval: float = None  # type: ignore[assignment]  # __post_init__ sets it
    #: What becomes of a task that still runs here when the message's lease was lost, as after a freeze: ``log`` lets it
    #: run to its end, ``terminate`` ends its pool process (prefork only); another worker runs it either way.
    on_lease_lost: Literal["log", "terminate"] = "log"
    #: Deliveries after which a message goes to the dead letters; 0 is never.
    delivery_limit: int = 20
    #: About how many dead letters a queue keeps.
    dead_letter_maxlen: int = 10_000
    #: Longest wait, in seconds, of a message that is rejected again and again.
    requeue_backoff_max: float = 60.0
    #: Seconds that a read waits for messages.
    block_timeout: float = 5.0
    #: Messages that one read takes at most.
    fetch_batch: int = 100
    #: Finished messages that are acknowledged together.
    ack_batch: int = 10
    #: Longest time, in seconds, that a finished message waits for its acknowledgement.
    ack_delay: float = 0.005
    #: Whether the broker holds messages with an ETA.
    delayed_delivery: bool = True
    #: Seconds ahead from which a message is held by the broker.
    delayed_min: float = 1.0
    #: Due messages that one read moves at most, per queue.
    delayed_batch: int = 500
    #: Priorities that have a stream of their own; 0 is the most urgent.
    priority_steps: tuple[int, ...] = (0, 3, 6, 9)
    #: About how many messages of a broadcast are kept for workers that reconnect.
    fanout_maxlen: int = 10_000
    #: Seconds after which a broadcast that a reconnecting worker missed is no longer news.
    fanout_max_age: float = 60.0
    #: The most messages of a queue; more are refused when published. None is no limit.
    max_length: int | None = None
    #: Name of the consumer group.
    group: str = "celery"
    #: Which end of the priorities is urgent: ``redis`` is 0, as in kombu's Redis transport, ``amqp`` is 9.
    priority_order: Literal["redis", "amqp"] = "redis"
    #: In which order the queues of one worker are read: each first in turn, as they are consumed, or by name.
    queue_order_strategy: Literal["round_robin", "priority", "sorted"] = "round_robin"
    #: Seconds after which the name of a consumer that is gone and holds nothing is removed.
    consumer_reap_after: float = 3600.0
    #: Before every key.
    global_keyprefix: str = ""
    #: Seconds past `block_timeout` after which a read that was not answered counts as a lost connection, and after
    #: which an unused connection is tried before it is used.
    health_check_interval: float = 25.0

    def __post_init__(self) -> None:
        if self.lease_renew_interval is None:
            object.__setattr__(self, "lease_renew_interval", self.lease_timeout / 4)
        if self.recovery_grace is None:
            object.__setattr__(self, "recovery_grace", self.lease_timeout / 2)
        if self.recovery_interval is None:
            object.__setattr__(self, "recovery_interval", self.lease_timeout / 4)

    @property
    def renew_interval(self) -> float:
        return self.lease_renew_interval


# ---- what each option may be ----------------------------------------------------------------------------------


class Rule(NamedTuple):
    """What an option may be, in words and as a test."""

    expected: str
    allows: Callable[[Any], bool]

    def or_none(self) -> Rule:
        return Rule(f"{self.expected}, or None", lambda value: value is None or self.allows(value))


def _number(least: float, most: float = math.inf, unit: str = "seconds") -> Rule:
    def allows(value: Any) -> bool:
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        return plain and math.isfinite(value) and least <= value <= most

    return Rule(f"a number of {unit}, {_bounds(least, most)}", allows)


def _integer(least: int, most: float = math.inf) -> Rule:
    def allows(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return Rule(f"an integer, {_bounds(least, most)}", allows)


def _bounds(least: float, most: float) -> str:
    return f"at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"


def _one_of(*choices: str) -> Rule:
    return Rule(f"one of {', '.join(map(repr, choices))}", lambda value: isinstance(value, str) and value in choices)


def _are_steps(value: Any) -> bool:
    if not isinstance(value, list | tuple | range) or not value:
        return False
    return all(_PRIORITY.allows(step) for step in value) and len(set(value)) == len(value)


_PRIORITY = _integer(0, 255)
_BOOLEAN = Rule("True or False", lambda value: isinstance(value, bool))
_TEXT = Rule("a string that is not empty", lambda value: isinstance(value, str) and value != "")
_MAPPING = Rule("a dict", lambda value: isinstance(value, Mapping))
#: A day: beyond it a figure is a mistake of the unit.
_DAY = 86_400.0

#: How our own options are checked.
RULES: Mapping[str, Rule] = {
    "lease_timeout": _number(0.2, 7 * _DAY),
    "lease_renew_interval": _number(0.05, _DAY).or_none(),
    "recovery_grace": _number(0, _DAY).or_none(),
    "recovery_interval": _number(0.05, _DAY).or_none(),
    "on_lease_lost": _one_of("log", "terminate"),
    "delivery_limit": _integer(0),
    "dead_letter_maxlen": _integer(1),
    "requeue_backoff_max": _number(0, _DAY),
    "block_timeout": _number(0.05, 3600),
    "fetch_batch": _integer(1, 10_000),
    # One command settles a batch, and Lua hands a command no more than 8,000 words.
    "ack_batch": _integer(1, 5000),
    "ack_delay": _number(0, 60),
    "delayed_delivery": _BOOLEAN,
    "delayed_min": _number(0),
    "delayed_batch": _integer(1, 10_000),
    "priority_steps": Rule("a list of different integers from 0 to 255, such as [0, 3, 6, 9]", _are_steps),
    "fanout_maxlen": _integer(1),
    "fanout_max_age": _number(0, _DAY),
    "max_length": _integer(1).or_none(),
    "group": _TEXT,
    "priority_order": _one_of("redis", "amqp"),
    "queue_order_strategy": _one_of("round_robin", "priority", "sorted"),
    "consumer_reap_after": _number(1),
    # Braces would be the hash tag, which must be the queue's name.
    "global_keyprefix": Rule(
        "a string without '{' and '}'", lambda value: isinstance(value, str) and not set(value) & {"{", "}"}
    ),
    "health_check_interval": _number(0.1, 3600),
}

#: Options of the connection to the server; connect.py uses them.
CONNECTION_RULES: Mapping[str, Rule] = {
    "socket_timeout": _number(0.1, 3600).or_none(),
    "socket_connect_timeout": _number(0.1, 3600).or_none(),
    "socket_keepalive": _BOOLEAN.or_none(),
    "socket_keepalive_options": _MAPPING.or_none(),
    # Redis refuses a name with spaces when the connection is made, which would look like an outage.
    "client_name": Rule(
        "a string without spaces and line breaks",
        lambda value: value is None or (isinstance(value, str) and value.isprintable() and " " not in value),
    ),
    "username": _TEXT.or_none(),
    "password": Rule("a string", lambda value: value is None or isinstance(value, str)),
    "credential_provider": Rule(
        "a redis.CredentialProvider, or the dotted name of such a class",
        lambda value: value is None or isinstance(value, str) or hasattr(value, "get_credentials"),
    ),
    "max_connections": _integer(2).or_none(),
    "master_name": _TEXT.or_none(),
    "sentinel_kwargs": _MAPPING.or_none(),
    "min_other_sentinels": _integer(0),
    "ssl": Rule(
        "True, False, or a dict of ssl_* options", lambda value: value is None or isinstance(value, bool | Mapping)
    ),
}
#: Their values are in no message.
SECRET = frozenset({"password", "sentinel_kwargs", "credential_provider", "ssl", "ssl_password"})

#: Used by kombu itself, when it connects and publishes.
KOMBU_OPTIONS = frozenset(
    {"max_retries", "interval_start", "interval_step", "interval_max", "connect_retries_timeout", "errback"}
)
#: Options of kombu's Redis transport that have no meaning here -> why, or what takes their place.
REPLACED: Mapping[str, str] = {
    "visibility_timeout": "a worker keeps its messages while it lives, and 'lease_timeout' (seconds, default 60) says "
    "when those of a dead one go to another",
    "retry_on_timeout": "a publish that is repeated could be a second message",
    "fanout_prefix": "broadcasts are streams, one per exchange",
    "fanout_patterns": "bindings with patterns are always kept",
    "sep": "bindings have a fixed format",
    "unacked_key": "the consumer group keeps what is not acknowledged",
    "unacked_index_key": "the consumer group keeps what is not acknowledged",
    "unacked_mutex_key": "taking over messages needs no lock",
    "unacked_mutex_expire": "taking over messages needs no lock",
    "unacked_restore_limit": "'fetch_batch' says how many messages one read takes",
    "ack_emulation": "acknowledgements are the server's own",
    "dead_letter": "dead letters stay in a stream of their queue, at most 'dead_letter_maxlen' of them; a receiver of "
    "the signal message_dead may do more",
    "queue_expires": "a queue ends by itself when it is declared so, as with kombu.Queue(..., expires=60)",
    "release_on_shutdown": "a worker that stops always hands back what it has not started",
    "delayed_poll": "a read waits just until the next message is due",
    "polling_interval": "'block_timeout' (seconds, default 5) says how long a read waits",
}

#: What was warned of: once per process, however many connections it opens.
_told: set[str] = set()


def read_options(given: Mapping[str, Any]) -> StreamOptions:
    """The options of a connection; unknown names are warned of, impossible values raise ConfigurationError."""
    for name in given:
        if name in RULES:
            check(name, given[name], RULES[name])
        elif name in CONNECTION_RULES:
            check(name, given[name], CONNECTION_RULES[name])
        else:
            _warn_of(name)
    ours = {name: value for name, value in given.items() if name in RULES}
    if "priority_steps" in ours:
        ours["priority_steps"] = tuple(sorted(ours["priority_steps"]))
    options = StreamOptions(**ours)
    _check_together(options)
    return options


def check(name: str, value: Any, rule: Rule) -> None:
    """Raise ConfigurationError, with the option, its value and what is expected."""
    if not rule.allows(value):
        shown = "not that (its value is not shown)" if name in SECRET else f"not {value!r}"
        raise ConfigurationError(f"transport option {name!r} is {rule.expected}; {shown}")


def _check_together(options: StreamOptions) -> None:
    # An owner that misses one renewal must still be in time with the next.
    if options.renew_interval * 2 > options.lease_timeout:
        raise ConfigurationError(
            f"transport option 'lease_renew_interval' is {options.renew_interval:g}; it is at most half of "
            f"'lease_timeout' ({options.lease_timeout:g}), or live workers lose their messages"
        )


def _warn_of(name: str) -> None:
    if name in KOMBU_OPTIONS or name.startswith("ssl_") or name in _told:
        return
    _told.add(name)
    if name in REPLACED:
        logger.warning("transport option %r has no effect here: %s", name, REPLACED[name])
    else:
        known = {field.name for field in dataclasses.fields(StreamOptions)} | CONNECTION_RULES.keys()
        logger.warning("unknown transport option %r has no effect.%s", name, did_you_mean(str(name), known))
