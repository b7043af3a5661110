"""The Lua scripts; each file's head says what its keys, arguments and reply are, and what a crash leaves behind."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError


@cache
def text(name: str) -> str:
    """The source of one script, such as ``fetch``."""
    return files(__name__).joinpath(f"{name}.lua").read_text()


@cache
def digest(name: str) -> str:
    """What the server knows a script by."""
    return hashlib.sha1(text(name).encode(), usedforsecurity=False).hexdigest()


def run(client: Any, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
    """Run a script by its digest; a server that was restarted or failed over is taught it first."""
    try:
        return client.execute_command("EVALSHA", digest(name), len(keys), *keys, *args)
    except NoScriptError:
        return client.execute_command("EVAL", text(name), len(keys), *keys, *args)
