"""A message is refused before Celery sees it exactly when Celery could not read its body."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.message import Message
from kombu.serialization import register, register_json

from celery_claim.bootsteps.unreadable import refusal

HEADERS = {"task": "proj.task", "id": "1"}
JSON = {"application/json"}
names = st.sampled_from(["__type__", "__value__", "name"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["uuid", "own"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


def received(body: Any, accept: set[str] | None = JSON, encoding: str = "utf-8") -> Message:
    return Message(
        body, content_type="application/json", content_encoding=encoding, headers=dict(HEADERS), accept=accept
    )


def readable(message: Message) -> bool:
    try:
        return message.payload is not None
    except Exception:
        return False


@given(st.lists(values, max_size=3), st.booleans())
@example([{"__type__": "own", "__value__": 1}], False)
@example([{"__type__": "uuid", "__value__": "no uuid"}], False)
@example([{"__type__": "datetime", "__value__": "2026-01-01T00:00:00"}], False)
def test_json_is_refused_exactly_when_kombu_cannot_read_it(arguments: list[Any], ascii_only: bool) -> None:
    body = json.dumps([arguments, {}, {}], ensure_ascii=ascii_only).encode()
    assert (refusal(received(body)) is None) == readable(received(body))


def test_a_key_in_other_letters_is_refused_as_well() -> None:
    body = rb'[[{"__ty\u0070e__": "own", "__value__": 1}], {}, {}]'
    assert not readable(received(body))
    assert str(refusal(received(body))).startswith("undecodable")


@given(st.binary(max_size=20), st.sampled_from(["utf-8", "binary", "latin-1", "nonsense"]))
@example(b"\xff[[], {}, {}]", "utf-8")
@example(b"\xef\xbb\xbf[[], {}, {}]", "utf-8")
def test_bytes_that_kombu_cannot_read_are_refused(body: bytes, encoding: str) -> None:
    if not readable(received(body, encoding=encoding)):
        assert refusal(received(body, encoding=encoding)) is not None


@pytest.mark.parametrize("accept", [set(), {"application/x-yaml"}])
def test_json_that_is_not_accepted_is_refused_as_kombu_refuses_it(accept: set[str]) -> None:
    body = b"[[], {}, {}]"
    assert (refusal(received(body, accept)) is None) == readable(received(body, accept))


@pytest.fixture
def own_decoder() -> Iterator[None]:
    """An app's decoder for JSON that knows comments, and wants an object somewhere."""

    def decode(text: bytes) -> Any:
        if b"{" not in text:
            raise ValueError("no object")
        return json.loads(text.partition(b"#")[0])

    register("json", json.dumps, decode, content_type="application/json", content_encoding="utf-8")
    yield
    register_json()


@pytest.mark.parametrize("body", [b"[[], {}, {}]", b"[[], {}, {}] # all", b"[[], [], []]", b"[[], {}"])
def test_where_an_app_has_a_decoder_of_its_own_that_one_decides(own_decoder: None, body: bytes) -> None:
    assert (refusal(received(body)) is None) == readable(received(body))
    if not readable(received(body)):
        assert str(refusal(received(body))).startswith("undecodable")
