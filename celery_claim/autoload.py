"""Makes the broker's URL schemes known, also to programs that never import the user's app (Flower, inspect).

Whoever loads nothing else of ours can name this module: ``CELERY_CONFIG_MODULE=celery_claim.autoload``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

#: URL schemes of the broker. The last is how kombu names a socket URL that it fails over to.
SCHEMES = ("redis-streams", "rediss-streams", "sentinel-streams", "redis-streams+socket")

#: Called once the transport is imported, which is when all plugins of the command line are: what extends them.
WHEN_TRANSPORT_IS_USED: list[Callable[[], object]] = []


def register() -> None:
    """Add our schemes to kombu's."""
    from kombu import transport

    for scheme in SCHEMES:
        transport.TRANSPORT_ALIASES.setdefault(scheme, "celery_claim.transport:Transport")


def arm_workers() -> None:
    """Give each worker that starts the step for redis-streams://, also for an app that never calls setup().

    Harmless when repeated; the step leaves a worker on another broker alone.
    """
    from celery.signals import worker_init

    worker_init.connect(_arm, weak=False, dispatch_uid=__name__)


def _arm(sender: Any, **_: Any) -> None:
    from celery_claim.bootsteps.streams import StreamsStep

    sender.app.steps["consumer"].add(StreamsStep)


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


#: What kombu loads by the entry point `kombu.serializers`: compact JSON, for messages that people read in Redis.
serializer = (_dumps, json.loads, "application/x-claim-json", "utf-8")

try:
    register()
except Exception:
    # An error here would break every `import kombu` of the machine; the scheme is then unknown, which kombu says.
    TRANSPORTS_REGISTERED = False
else:
    TRANSPORTS_REGISTERED = True
