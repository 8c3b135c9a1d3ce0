"""Interrupting a thread that waits on sockets, from any other thread."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """A pair of connected sockets: the waiting thread polls `fd`, anybody calls `wake`.

    A wake is never lost: one made while nobody waits ends the next wait at once.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    @property
    def fd(self) -> int:
        """Readable after a wake."""
        return self._reader.fileno()

    def wake(self) -> None:
        """End the current or the next wait. Never blocks; after `close` it does nothing."""
        # A full pipe holds a wake already; a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget the wakes so far."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
