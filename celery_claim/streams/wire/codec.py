"""A kombu message as the fields of a stream entry, readable by people and by other languages."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

#: Headers that Celery always sends and reads with a default of None: not worth their bytes when empty.
EMPTY_BY_DEFAULT = frozenset(
    "eta expires group group_index shadow parent_id stamped_headers stamps replaced_task_nesting compression".split()
)
#: Properties that are the same in nearly every message, or belong to one delivery.
DEFAULT_PROPERTIES: dict[str, Any] = {"delivery_mode": 2, "priority": 0}
PER_DELIVERY = frozenset({"delivery_tag", "body_encoding", "delivery_info"})


class Undecodable(ValueError):
    """These fields are not a message of ours; the text says why."""


def encode(message: Mapping[str, Any]) -> dict[str, bytes | str]:
    """Fields for XADD: `body` as it is, the rest as JSON without what is the default."""
    properties = message.get("properties") or {}
    kept = {
        name: value
        for name, value in properties.items()
        if name not in PER_DELIVERY and value is not None and DEFAULT_PROPERTIES.get(name) != value
    }
    where = {name: value for name, value in (properties.get("delivery_info") or {}).items() if value not in (None, "")}
    if where:
        kept["delivery_info"] = where
    headers = {
        name: value
        for name, value in (message.get("headers") or {}).items()
        if value is not None or name not in EMPTY_BY_DEFAULT
    }
    body = message.get("body")
    fields: dict[str, bytes | str] = {"body": b"" if body is None else body}
    for name in ("content-type", "content-encoding"):
        if message.get(name):
            fields[name] = message[name]
    if headers:
        fields["headers"] = json.dumps(headers, separators=(",", ":"), default=str)
    if kept:
        fields["properties"] = json.dumps(kept, separators=(",", ":"), default=str)
    return fields


def decode(fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """The kombu message of an entry; Undecodable when the fields are not one."""
    if b"m" in fields:
        return _kombu_form(fields[b"m"])
    if b"body" not in fields:
        raise Undecodable("the entry has no field 'body'")
    try:
        headers = json.loads(fields.get(b"headers", b"{}"))
        properties = json.loads(fields.get(b"properties", b"{}"))
        content_type = fields.get(b"content-type", b"").decode() or None
        content_encoding = fields.get(b"content-encoding", b"").decode() or None
    except ValueError as error:
        raise Undecodable(f"a field is not JSON in UTF-8: {error}") from None
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        raise Undecodable("'headers' and 'properties' must be JSON objects")
    properties = {**DEFAULT_PROPERTIES, "delivery_info": {}, **properties}
    return {
        "body": fields[b"body"],
        "content-type": content_type,
        "content-encoding": content_encoding,
        "headers": headers,
        "properties": properties,
    }


def _kombu_form(raw: bytes) -> dict[str, Any]:
    """A message as kombu's own virtual transports write it: one JSON document, its body mostly in base64."""
    try:
        message = json.loads(raw)
        properties = message["properties"]
        if properties.pop("body_encoding", None) == "base64":
            message["body"] = base64.b64decode(message["body"])
        properties.setdefault("delivery_info", {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Undecodable(f"field 'm' is not a kombu message: {error!r}") from None
    return dict(message)
