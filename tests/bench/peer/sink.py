"""The file to which every finished job appends one record: how a drain by foreign programs is timed.

Imported by the peers' processes, which have no package of ours: the standard library only.
"""

from __future__ import annotations

import os
import struct
import time

RECORD = struct.Struct("<qd")  # the job's number, the monotonic time it ended

_path: str | None = None
_descriptor = -1


def done(number: int) -> None:
    """The body of every job: about two microseconds."""
    global _path, _descriptor
    if _path != os.environ["BENCH_SINK"]:
        _path = os.environ["BENCH_SINK"]
        _descriptor = os.open(_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(_descriptor, RECORD.pack(number, time.monotonic()))


def count(path: str) -> int:
    return os.stat(path).st_size // RECORD.size


def records(path: str) -> list[tuple[int, float]]:
    with open(path, "rb") as file:
        return list(RECORD.iter_unpack(file.read()))
