"""A kombu message as the fields of a stream entry, readable by people and by other languages.

body          as it is: JSON text as a rule, never base64
headers       JSON object; of a Celery task without what is in TASK_DEFAULTS, and without root_id when it is the id
properties    JSON object without what is in DEFAULT_PROPERTIES; a task's correlation_id is its id unless it says so,
              and delivery_info says where it was sent unless that is straight to the queue
content-type, content-encoding    only when they are not application/json and utf-8
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

#: Headers of a Celery task message that nearly always have these values.
TASK_DEFAULTS: dict[str, Any] = {
    "lang": "py", "shadow": None, "eta": None, "expires": None, "group": None, "group_index": None, "retries": 0,
    "timelimit": [None, None], "parent_id": None, "kwargsrepr": "{}", "replaced_task_nesting": 0,
    "stamped_headers": None, "stamps": {},
}  # fmt: skip
#: What a message is unless its entry says otherwise.
DEFAULT_CONTENT = {"content-type": "application/json", "content-encoding": "utf-8"}
DEFAULT_PROPERTIES: dict[str, Any] = {"delivery_mode": 2, "priority": 0}
#: These belong to one delivery.
PER_DELIVERY = frozenset({"delivery_tag", "body_encoding", "delivery_info"})

_to_json = json.JSONEncoder(separators=(",", ":"), default=str).encode
_MISSING = object()


class Undecodable(ValueError):
    """These fields are not a message of ours; the text says why."""


def encode(message: Mapping[str, Any], queue: str) -> dict[str, bytes | str]:
    """Fields for XADD of a message that goes to a queue."""
    headers: Mapping[str, Any] = message.get("headers") or {}
    properties = message.get("properties") or {}
    kept = {
        name: value
        for name, value in properties.items()
        if name not in PER_DELIVERY and value is not None and DEFAULT_PROPERTIES.get(name) != value
    }
    where = {name: value for name, value in (properties.get("delivery_info") or {}).items() if value not in (None, "")}
    if where and where != {"routing_key": queue}:
        kept["delivery_info"] = where
    if _is_task(headers):
        task_id = headers["id"]
        if kept.get("correlation_id") == task_id:
            del kept["correlation_id"]
        headers = {
            name: value
            for name, value in headers.items()
            if TASK_DEFAULTS.get(name, _MISSING) != value and (name != "root_id" or value != task_id)
        }
    body = message.get("body")
    fields: dict[str, bytes | str] = {"body": b"" if body is None else body}
    for name, usual in DEFAULT_CONTENT.items():
        if message.get(name) != usual:
            fields[name] = message.get(name) or ""
    if headers:
        fields["headers"] = _to_json(headers)
    if kept:
        fields["properties"] = _to_json(kept)
    return fields


def decode(fields: Mapping[bytes, bytes], queue: str) -> dict[str, Any]:
    """The kombu message of an entry of a queue; Undecodable when the fields are not one."""
    if b"m" in fields:
        message = _kombu_form(fields[b"m"])
    else:
        message = _plain_form(fields)
    where = message["properties"]["delivery_info"]
    where.setdefault("exchange", "")
    where.setdefault("routing_key", queue)
    return message


def _plain_form(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    if b"body" not in fields:
        raise Undecodable("the entry has no field 'body'")
    try:
        # A string is read faster than bytes, whose encoding would be guessed first.
        headers = json.loads(fields.get(b"headers", b"{}").decode())
        properties = json.loads(fields.get(b"properties", b"{}").decode())
        content_type, content_encoding = (
            fields[name.encode()].decode() or None if name.encode() in fields else usual
            for name, usual in DEFAULT_CONTENT.items()
        )
    except (ValueError, RecursionError) as error:
        raise Undecodable(f"a field is not JSON in UTF-8: {error}") from None
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        raise Undecodable("'headers' and 'properties' must be JSON objects")
    properties = {**DEFAULT_PROPERTIES, "delivery_info": {}, **properties}
    if not isinstance(properties["delivery_info"], dict):
        raise Undecodable("'delivery_info' must be a JSON object")
    if _is_task(headers):
        # What can be changed in place is made anew for each message.
        headers = {**TASK_DEFAULTS, "timelimit": [None, None], "stamps": {}, "root_id": headers["id"], **headers}
        properties.setdefault("correlation_id", headers["id"])
    return {
        "body": fields[b"body"],
        "content-type": content_type,
        "content-encoding": content_encoding,
        "headers": headers,
        "properties": properties,
    }


def _is_task(headers: Mapping[str, Any]) -> bool:
    return "task" in headers and "id" in headers


def _kombu_form(raw: bytes) -> dict[str, Any]:
    """A message as kombu's own virtual transports write it: one JSON document, its body mostly in base64."""
    try:
        message = json.loads(raw)
        properties = message["properties"]
        if properties.pop("body_encoding", None) == "base64":
            message["body"] = base64.b64decode(message["body"])
        properties.setdefault("delivery_info", {})
        message.setdefault("headers", {})
        if not isinstance(properties["delivery_info"], dict) or not isinstance(message["headers"], dict):
            raise TypeError("'delivery_info' and 'headers' must be JSON objects")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Undecodable(f"field 'm' is not a kombu message: {error!r}") from None
    return dict(message)
