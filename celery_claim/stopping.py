"""Whether this worker is shutting down, known in every process of its pool.

Celery sends `worker_shutting_down` in the parent only. One byte of shared memory, made before any pool process is
forked, carries it into the children.
"""

from __future__ import annotations

import mmap

from celery.signals import worker_init, worker_shutting_down

_flag = mmap.mmap(-1, 1)


def worker_is_stopping() -> bool:
    """Whether no further row may be started in this worker."""
    return _flag[0] != 0


def _set(value: int) -> None:
    _flag[0] = value


@worker_shutting_down.connect(weak=False)
def _stop(**_: object) -> None:
    _set(1)


@worker_init.connect(weak=False)
def _start(**_: object) -> None:
    _set(0)
