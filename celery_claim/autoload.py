"""Makes the broker's URL schemes known, also to programs that never import the user's app (Flower, inspect).

Whoever loads nothing else of ours can name this module: ``CELERY_CONFIG_MODULE=celery_claim.autoload``.
"""

from __future__ import annotations

import json
from typing import Any

#: URL schemes of the broker. The last is how kombu names a socket URL that it fails over to.
SCHEMES = ("redis-streams", "rediss-streams", "sentinel-streams", "redis-streams+socket")


def register() -> None:
    """Add our schemes to kombu's."""
    from kombu import transport

    for scheme in SCHEMES:
        transport.TRANSPORT_ALIASES.setdefault(scheme, "celery_claim.transport:Transport")


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
