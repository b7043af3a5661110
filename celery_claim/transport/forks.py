"""Sockets do not outlive their process: a child that keeps a copy of one keeps the connection open at the server.

The server would go on handing messages to a reader whose process was killed, for as long as a child of it lives.
"""

from __future__ import annotations

import os
import socket
import weakref

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def remember(sock: socket.socket) -> None:
    """Close this socket's copy in every child that is forked from now on; the parent's is not touched."""
    _open.add(sock)


def _close_copies() -> None:
    for sock in list(_open):
        # Not shutdown(), which would end the parent's connection.
        sock.close()
    _open.clear()


os.register_at_fork(after_in_child=_close_copies)
