"""What a prefork pool does with its tasks when the connection to the broker breaks."""

from __future__ import annotations

from typing import Any


def keep_what_is_on_its_way(pool: Any) -> None:
    """Let the flush of a prefork pool spare the tasks that its processes have been sent and not confirmed yet.

    Celery forgets them then, because its brokers deliver them again. The processes run them all the same, and so does
    the successor of a process that died, which inherits the pipe: each would be run twice. Here they stay with this
    worker like those that run already: the keeper renews their leases, and they are acknowledged when they end. Of a
    process that dies meanwhile the pool takes the pipe away, and writes the task to another one. A worker that dies
    loses the lease.
    """
    inner: Any = getattr(pool, "_pool", None)
    if not hasattr(inner, "outbound_buffer"):
        # Threads and greenlets have no pipe, and forget nothing.
        return

    def flush() -> None:
        sent = [(job, job._write_to) for job in list(inner._cache.values()) if _is_on_its_way(job, inner)]
        # The flush spares what was confirmed. The process's own confirmation, which still comes, counts as ever.
        for job, _ in sent:
            job._accepted = True
        try:
            inner.flush()
        finally:
            for job, process in sent:
                _wait_for_confirmation(job, process, inner)

    pool.flush = flush


def _is_on_its_way(job: Any, inner: Any) -> bool:
    """Whether a process was sent a job, or the beginning of it, and has not said that it took it up."""
    return getattr(job, "_write_to", None) is not None and job._accepted is False and job not in inner.outbound_buffer


def _wait_for_confirmation(job: Any, process: Any, inner: Any) -> None:
    if job._worker_pid is not None:
        # It came: the flush reads what a process said that has just died.
        return
    job._accepted = False
    # Not `job._write_to`: when a new process has a pipe of the same number, the pool takes it for the same pipe.
    if process.dead and job._job in inner._cache:
        # The flush has cleaned up after the process, and took the job for one that ran. A dead process that is not
        # marked so is still to be cleaned up after; the pool itself puts the job back then.
        inner._put_back(job)
