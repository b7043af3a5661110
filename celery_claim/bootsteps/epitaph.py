"""A dead letter's task is failed: its result says so, in the result backend and in the events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from celery import states
from celery.app.task import Context
from celery.exceptions import NotRegistered
from kombu.message import Message
from kombu.serialization import prepare_accept_content

from celery_claim.exceptions import DeliveryLimitExceeded, MessageRefused
from celery_claim.streams.dead_letters import DELIVERY_LIMIT, REJECTED, UNKNOWN_TASK, Death
from celery_claim.streams.wire import codec

#: Seconds that a rejected task has to write its own result, such as the error for which Celery rejects it.
OWN_RESULT_SECONDS = 1.0


def mark_failed(app: Any, death: Death, *, send_event: bool) -> bool:
    """Write the failure of a dead letter's task; False for a message without one, or that has its result already."""
    if death.task_id is None:
        return False
    request = _request_of(app, death)
    if death.reason == REJECTED:
        time.sleep(OWN_RESULT_SECONDS)
    if app.backend.get_state(death.task_id) in states.READY_STATES:
        return False
    error = _error_of(death)
    app.backend.mark_as_failure(death.task_id, error, request=request, store_result=_stores(app, death, request))
    if send_event:
        with app.events.default_dispatcher() as dispatcher:
            dispatcher.send("task-failed", uuid=death.task_id, exception=repr(error), traceback="")
    return True


def _error_of(death: Death) -> Exception:
    if death.reason.startswith(UNKNOWN_TASK):
        return NotRegistered(death.task)
    where = f"queue {death.queue}, see: celery claim dead {death.queue}"
    if death.reason == DELIVERY_LIMIT:
        return DeliveryLimitExceeded(
            f"{death.task} was delivered {death.deliveries} times without an end; it is a dead letter of {where}"
        )
    return MessageRefused(f"{death.task} was not run ({death.reason}); it is a dead letter of {where}")


def _request_of(app: Any, death: Death) -> Context:
    """What the backend needs to know: error callbacks and a chord hear of the failure as of any other."""
    try:
        fields = codec.decode(death.fields)
        message = Message(
            body=fields["body"],
            headers=fields["headers"],
            properties=fields["properties"],
            content_type=fields["content-type"],
            content_encoding=fields["content-encoding"],
            accept=prepare_accept_content(app.conf.accept_content),
        )
        args, kwargs, embed = message.decode()
    except Exception:
        # Nobody can read it, which is why it is dead: what cannot be known of it has no callbacks.
        return Context({"id": death.task_id, "task": death.task, "errbacks": None, "chord": None})
    known = embed if isinstance(embed, Mapping) else {}
    properties = fields["properties"]
    return Context({
        **fields["headers"], **known, "args": args, "kwargs": kwargs,
        "reply_to": properties.get("reply_to"), "correlation_id": properties.get("correlation_id"),
    })  # fmt: skip


def _stores(app: Any, death: Death, request: Context) -> bool:
    task = app.tasks.get(death.task)
    if task is not None and task.store_errors_even_if_ignored:
        return True
    ignored = getattr(request, "ignore_result", None)
    if ignored is None:
        ignored = task.ignore_result if task is not None else False
    return not ignored
