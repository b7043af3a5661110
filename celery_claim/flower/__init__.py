"""Flower shows what it does not know by itself: the queues of a redis-streams:// broker on its Broker page.

Nothing needs to be set where Flower runs as `celery -A proj flower`. A program that makes Flower's application by
itself calls `install()` once, for example in `flowerconfig.py`.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def install() -> bool:
    """Teach Flower our schemes; harmless when repeated. Never raises: Flower works without it, and the log says why."""
    try:
        from celery_claim.flower import broker

        broker.install()
    except Exception as error:
        logger.warning("Flower's Broker page will not know redis-streams:// brokers: %r", error)
        return False
    return True
