"""The Lua scripts; each file's head says what its keys, arguments and reply are."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def text(name: str) -> str:
    """The source of one script, such as ``fetch``."""
    return files(__name__).joinpath(f"{name}.lua").read_text()
