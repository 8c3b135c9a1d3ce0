"""The thread that owns a channel end's sockets, so that it serves, relays and reconnects whatever its owner does."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq

from headway.errors import WireError
from headway.stream.security import Guard
from headway.stream.transport import Context, Socket, milliseconds
from headway.stream.waker import Waker

_log = logging.getLogger(__name__)
CLOSE_S = 10.0


class Node:
    """Base of both ends. Subclasses open sockets in their constructor, then call `start`.

    The constructor's thread makes the sockets and hands them to the node's thread, which alone uses them from
    then on; `changed` guards what both share.

    Attributes:
        changed: condition for shared state; notified when it changes, and when the node ends.
        rejected: messages dropped because they were not valid, by reason.
        guard: who lets CURVE peers in, of a learner that has keys.
    """

    def __init__(self, name: str) -> None:
        self.changed = threading.Condition()
        self.rejected: Counter[str] = Counter()
        self._name = name
        self._context: Context = zmq.Context()
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self.guard: Guard | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Let the node's thread go."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._farewell()
        except BaseException as error:
            _log.exception("%s has failed", self._name)
            self._failure = error
        finally:
            self._dispose(linger=300)
            with self.changed:
                self._stopping = True
                self.changed.notify_all()

    def _dispose(self, linger: int) -> None:
        if self.guard is not None:
            self.guard.close()
        self._context.destroy(linger=linger)

    def _turn(self) -> None:
        """One round: wait for input at most until the next thing is due, handle it, do what is due."""
        raise NotImplementedError

    def _farewell(self) -> None:
        """Last words, on the node's thread, with its sockets still open."""

    def _poll(self, timeout_s: float) -> None:
        events = dict(self._poller.poll(milliseconds(timeout_s)))
        if self._waker.fd in events:
            self._waker.clear()

    def _guarded(self, handle: Callable[..., None], *arguments: Any) -> None:
        """Handle input; what is wrong with it is counted and never raised."""
        try:
            handle(*arguments)
        except WireError as fault:
            self.rejected[fault.reason] += 1
            if self.rejected[fault.reason] == 1:
                _log.warning(
                    "%s dropped a message (more of this kind are only counted): %s", self._name, fault
                )

    def _watch(self, *sockets: Socket) -> None:
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)

    def _unwatch(self, *sockets: Socket) -> None:
        for socket in sockets:
            self._poller.unregister(socket)

    def _check_alive(self) -> None:
        """Raises what ended the node, if anything did; the caller wraps it."""
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise RuntimeError(f"{self._name} is closed")

    def stop(self) -> None:
        """End the thread and close its sockets, within CLOSE_S. Idempotent."""
        self._stopping = True
        self._waker.wake()
        if self._thread is None:
            self._dispose(linger=0)
        else:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                _log.error("%s did not end within %.0f s", self._name, CLOSE_S)
                return
        self._waker.close()
