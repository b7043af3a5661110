"""Messages that a worker cannot run: each becomes a dead letter with its reason, and none ends the worker.

Celery acknowledges what it cannot decode, so that message is gone; it prints the body of what it refuses, and some
forged headers raise in its event loop, which ends the worker. So messages are looked at before Celery sees them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery import signals
from kombu.serialization import registry  # type: ignore[attr-defined]
from kombu.utils import json as kombu_json

logger = logging.getLogger(__name__)

#: Characters of an error that a dead letter's reason keeps; the rest may be the message itself.
REASON_CHARACTERS = 200
JSON = "application/json"

_from_json = json.JSONDecoder().decode


def refusal(message: Any) -> str | None:
    """Why a message cannot be a task, or None when it can be one."""
    try:
        payload = _payload(message)
    except Exception as error:
        return f"undecodable: {_short(error)}"
    headers = message.headers
    if not isinstance(headers, Mapping):
        return "invalid: the headers are no mapping"
    if "task" not in headers:
        return _wrong_first_protocol(payload)
    return _wrong_headers(headers) or _wrong_payload(payload)


def _payload(message: Any) -> Any:
    """What the body says; an error when Celery could not read it.

    Celery decodes it again, in the process that runs the task, so this must be quick: what kombu's JSON decoder adds to
    the standard one are its own types, and without them the standard one needs a third of the time. Where an app has
    registered a decoder of its own, that one decides.
    """
    body = message.body
    plain = (
        message.content_type == JSON
        and message.content_encoding == "utf-8"
        and JSON in (message.accept or ())
        and registry._decoders.get(JSON) is kombu_json.loads
        and isinstance(body, bytes)
        # The mark of such a value, and what could hide it.
        and b"__type__" not in body
        and b"\\u" not in body
    )
    return _from_json(body.decode()) if plain else message.payload


def _wrong_first_protocol(payload: Any) -> str | None:
    if not isinstance(payload, Mapping) or not isinstance(payload.get("task"), str):
        return "invalid: it names no task"
    return _wrong_headers(payload) or _wrong_arguments(payload.get("args", ()), payload.get("kwargs", {}))


def _wrong_headers(headers: Mapping[str, Any]) -> str | None:
    for name in ("task", "id"):
        if not isinstance(headers.get(name), str):
            return f"invalid: {name} is missing or no text"
    limits = headers.get("timelimit")
    if limits and not (isinstance(limits, list | tuple) and len(limits) == 2 and all(map(_is_seconds, limits))):
        return "invalid: timelimit is no pair of seconds"
    if not isinstance(headers.get("retries") or 0, int):
        return "invalid: retries is no number"
    return None


def _wrong_payload(payload: Any) -> str | None:
    if isinstance(payload, Mapping) and "args" in payload:
        return _wrong_arguments(payload["args"], payload.get("kwargs", {}))
    if not isinstance(payload, list | tuple) or len(payload) != 3:
        return "invalid: the body is not [args, kwargs, embed]"
    if payload[2] is not None and not isinstance(payload[2], Mapping):
        return "invalid: embed is no mapping"
    return _wrong_arguments(payload[0], payload[1])


def _wrong_arguments(args: Any, kwargs: Any) -> str | None:
    if not isinstance(args, list | tuple):
        return "invalid: args is no list"
    if not isinstance(kwargs, Mapping):
        return "invalid: kwargs is no mapping"
    return None


def _is_seconds(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:REASON_CHARACTERS]


class Refusals:
    """Takes the place of a consumer's handlers of messages that are no tasks."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._make_handler: Callable[..., Callable[[Any], Any]] = consumer.create_task_handler
        consumer.create_task_handler = self.create_task_handler
        consumer.on_decode_error = self.on_decode_error
        consumer.on_invalid_task = self.on_invalid_task
        consumer.on_unknown_message = self.on_unknown_message
        consumer.on_unknown_task = self.on_unknown_task

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        handle = self._make_handler(*args, **kwargs)

        def on_task_received(message: Any) -> Any:
            reason = refusal(message)
            return handle(message) if reason is None else self._refuse(message, reason)

        return on_task_received

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self._refuse(message, f"undecodable: {_short(exc)}", exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        self._refuse(message, f"invalid: {_short(exc)}", exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        self._refuse(message, "invalid: it names no task")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        headers = message.headers if "task" in message.headers else message.payload
        self._bury(message, f"unknown task {headers['task']!r}")
        signals.task_unknown.send(
            sender=self._consumer, message=message, exc=exc, name=headers["task"], id=headers["id"]
        )

    def _refuse(self, message: Any, reason: str, exc: Exception | None = None) -> None:
        self._bury(message, reason)
        signals.task_rejected.send(sender=self._consumer, message=message, exc=exc)

    def _bury(self, message: Any, reason: str) -> None:
        errors = self._consumer.connection_errors
        try:
            message.channel.bury(message.delivery_tag, reason)
        except errors as error:
            # It stays ours until the connection is made again; then it is delivered, and refused, once more.
            logger.error("message %s could not be moved to the dead letters: %s", message.delivery_tag, error)
            return
        message.reject_log_error(logger, errors)
