"""kombu's transport-neutral test classes with the fixtures that they want; copied beside kombu's own `t` and run there.

No test is written here: each comes from the integration tests of the source distribution.
"""

from __future__ import annotations

import inspect
import os
from typing import Any
from urllib.parse import urlsplit

import kombu
import pytest
import redis
from t.integration import common, test_redis

LIVE = os.environ["SUITE_BROKER"]
_place = urlsplit(LIVE)
#: Nobody listens on this port.
DEAD = _place._replace(netloc=f"{_place.hostname}:1").geturl()


@pytest.fixture(autouse=True)
def _an_empty_server() -> None:
    """The queues have fixed names: what a failed test leaves behind would fail the next."""
    with redis.Redis(host=_place.hostname or "", port=_place.port or 0) as client:
        client.flushall()


@pytest.fixture(params=[None, {"global_keyprefix": "suite_"}], ids=["plain", "keyprefix"])
def connection(request: pytest.FixtureRequest) -> kombu.Connection:
    return kombu.Connection(LIVE, transport_options=request.param)


@pytest.fixture
def invalid_connection() -> kombu.Connection:
    return kombu.Connection(DEAD)


@pytest.fixture
def failover_connection() -> kombu.Connection:
    return kombu.Connection(f"{DEAD};{LIVE}")


def _adopt(base: type, **changed: Any) -> None:
    name = base.__name__ if base.__name__.startswith("test_") else f"test_{base.__name__}"
    globals()[name] = type(name, (base,), {"__module__": __name__, **changed})


for _each in list(vars(common).values()):
    if inspect.isclass(_each) and _each.__module__ == common.__name__ and any("test_" in name for name in dir(_each)):
        # The other way round than in AMQP: 0 is the most urgent, as of redis://.
        _adopt(_each, PRIORITY_ORDER="desc")
_adopt(test_redis.test_RedisPriority)
# Without the one that looks at redis://'s PUB/SUB.
_adopt(test_redis.test_RedisPublishBatch, test_fanout_is_deferred_until_flush=None)
