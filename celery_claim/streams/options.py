"""The transport options of Redis Streams, each with its default and its unit."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from celery_claim.exceptions import ConfigurationError, did_you_mean

logger = logging.getLogger("celery_claim.streams")

#: Understood by kombu, by Celery or by redis-py's connections, and passed on to the latter.
CONNECTION_OPTIONS = frozenset(
    "socket_timeout socket_connect_timeout socket_keepalive socket_keepalive_options health_check_interval "
    "client_name username password credential_provider ssl max_connections "
    "master_name sentinel_kwargs min_other_sentinels".split()
)
HOST_OPTIONS = frozenset(
    "polling_interval max_retries interval_start interval_step interval_max retry_policy confirm_publish "
    "client_properties connect_retries_timeout errback body_encoding deadletter_queue".split()
)


@dataclass(frozen=True)
class StreamOptions:
    """How messages are held, given back and delayed."""

    #: Seconds without a sign of life after which a worker's messages go to another worker.
    lease_timeout: float = 60.0
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

    @property
    def renew_interval(self) -> float:
        return self.lease_timeout / 4

    @property
    def recovery_grace(self) -> float:
        """Seconds after a connect before a consumer takes over others' messages: two renewals of any live owner."""
        return self.lease_timeout / 2


def read_options(given: Mapping[str, Any]) -> StreamOptions:
    """The options of a connection; unknown names are warned of, impossible values raise ConfigurationError."""
    fields = {field.name for field in dataclasses.fields(StreamOptions)}
    ours = {name: value for name, value in given.items() if name in fields}
    for name in given.keys() - fields - CONNECTION_OPTIONS - HOST_OPTIONS:
        if name == "visibility_timeout":
            logger.warning(
                "transport option 'visibility_timeout' has no effect here: a worker keeps its messages while it lives, "
                "and 'lease_timeout' (seconds, default 60) says when those of a dead one go to another"
            )
        elif not name.startswith("ssl_"):
            logger.warning("unknown transport option %r.%s", name, did_you_mean(name, fields | CONNECTION_OPTIONS))
    if "priority_steps" in ours:
        ours["priority_steps"] = tuple(sorted(ours["priority_steps"]))
    options = StreamOptions(**ours)
    for name, least in (("lease_timeout", 0.2), ("block_timeout", 0.05), ("fetch_batch", 1), ("ack_batch", 1)):
        if getattr(options, name) < least:
            raise ConfigurationError(f"transport option {name!r} is {getattr(options, name)!r}; the least is {least}")
    for name, choices in (
        ("priority_order", ("redis", "amqp")),
        ("queue_order_strategy", ("round_robin", "priority", "sorted")),
    ):
        if getattr(options, name) not in choices:
            raise ConfigurationError(
                f"transport option {name!r} is {getattr(options, name)!r}; it is one of {', '.join(choices)}"
            )
    if not options.priority_steps:
        raise ConfigurationError("transport option 'priority_steps' is empty; the default is [0, 3, 6, 9]")
    return options
