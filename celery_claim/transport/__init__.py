"""The broker `redis-streams://`: kombu's side of celery_claim.streams."""

from __future__ import annotations

from celery_claim.autoload import WHEN_TRANSPORT_IS_USED, arm_workers
from celery_claim.transport.channel import Channel
from celery_claim.transport.qos import QoS
from celery_claim.transport.transport import Transport

__all__ = ["Channel", "QoS", "Transport"]

arm_workers()
for extend in WHEN_TRANSPORT_IS_USED:
    extend()
