"""Objects that one thread of one process owns. Two threads in one socket abort the process hours later."""

from __future__ import annotations

import os
import threading

from headway.errors import OwnershipError


class Owned:
    """Base of the socket wrappers: the creating thread owns it until it calls `release`.

    A forked child inherits the object but never owns it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._owner: threading.Thread | None = threading.current_thread()

    def release(self) -> None:
        """Give the object up; the next thread that uses it becomes its owner. The caller must own it."""
        self._own()
        self._owner = None

    def _own(self) -> None:
        """First line of every method that touches the socket.

        Raises:
            OwnershipError: another thread owns it, or this is a forked child.
        """
        thread = threading.current_thread()
        if self._owner is thread and self._pid == os.getpid():
            return
        if self._pid != os.getpid():
            raise OwnershipError(
                f"{self._name} belongs to process {self._pid}, used in its forked child {os.getpid()}; "
                "spawn the child, or open a socket of its own"
            )
        if self._owner is not None:
            raise OwnershipError(
                f"{self._name} belongs to thread {self._owner.name!r}, used from {thread.name!r}; "
                "call release() in the owner first, or wake() to interrupt it"
            )
        self._owner = thread

    def _may_close(self) -> bool:
        """Whether closing must do anything; an owner that has ended may be cleaned up after by anyone."""
        if self._pid != os.getpid():
            return False
        if self._owner is not None and not self._owner.is_alive():
            self._owner = threading.current_thread()
        self._own()
        return True
