"""Which requests a worker has begun: after the end of its reading, no other is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

#: Pools that keep a queue of their own inside this process. Their work begins when a thread or greenlet takes it; with
#: any other pool, it begins when the pool gets it.
QUEUEING_POOLS = ("celery.concurrency.thread", "celery.concurrency.gevent", "celery.concurrency.eventlet")


class Starts:
    """Stands before a pool's `apply_async`, and lets nothing in any more once it is closed.

    The decision is one step under a lock, so a request either runs here or goes back to the queue, never both.
    """

    def __init__(self, pool: Any) -> None:
        self._apply: Callable[..., Any] = pool.apply_async
        self._queueing = type(pool).__module__ in QUEUEING_POOLS
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """From here on nothing begins."""
        with self._lock:
            self._closed = True

    def has_begun(self, request: Any) -> bool:
        with self._lock:
            return request in self._begun

    def apply_async(self, target: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """The pool's own, for what may still begin; None for what is not taken."""
        request = getattr(options.get("accept_callback"), "__self__", None)
        if not self._queueing:
            return self._apply(target, args, kwargs, **options) if self._begin(request) else None
        return self._apply_later(request, target, args, kwargs, **options)

    def _apply_later(
        self,
        request: Any,
        target: Any,
        args: Any,
        kwargs: Any,
        *,
        accept_callback: Callable[..., Any] | None = None,
        callback: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Any:
        begun = False

        def accept(*given: Any) -> None:
            nonlocal begun
            begun = self._begin(request)
            if begun and accept_callback is not None:
                accept_callback(*given)

        def run(*given: Any, **named: Any) -> Any:
            return target(*given, **named) if begun else None

        def finish(result: Any) -> None:
            if begun and callback is not None:
                callback(result)

        return self._apply(run, args, kwargs, accept_callback=accept, callback=finish, **options)

    def _begin(self, request: Any) -> bool:
        with self._lock:
            if self._closed:
                return False
            if request is not None:
                self._begun.add(request)
            return True
