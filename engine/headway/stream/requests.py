"""Requests to a live run from another process of the same user: `headway set`.

The supervisor serves them on a socket in the run's private directory (mode 0700): who may enter it may ask.
Same codec as the other sockets; a request is a Command, its answer an Event.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import zmq

from headway.errors import DeadlineExceeded, StreamError, WireError
from headway.stream.endpoint import bind, ipc_directory, ipc_endpoint, listening
from headway.stream.owned import Owned
from headway.stream.transport import (
    SEND_GUARD,
    Context,
    Socket,
    milliseconds,
    open_socket,
    receive_frames,
    send_frames,
)
from headway.wire.codec import DEFAULT_LIMITS, decode, encode
from headway.wire.messages import Command, Event

_NAME = "set"
_MAX_MESSAGES = 64


class RequestServer(Owned):
    """The supervisor's end; never waits."""

    def __init__(self, run_id: str) -> None:
        """Bind.

        Raises:
            StreamError: the run's directory is not ours alone, or its path is too long.
        """
        super().__init__("the supervisor's request socket")
        self.rejected: Counter[str] = Counter()
        """Requests dropped because they were not valid, by reason."""
        self._context: Context = zmq.Context()
        self._socket: Socket = open_socket(
            self._context, zmq.ROUTER, send_mark=SEND_GUARD, limits=DEFAULT_LIMITS
        )
        try:
            self.endpoint = bind(self._socket, ipc_endpoint(ipc_directory(run_id), _NAME))
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def poll(self) -> list[tuple[bytes, Command]]:
        """Who asks, and what; at most a few dozen at once."""
        self._own()
        requests: list[tuple[bytes, Command]] = []
        for _ in range(_MAX_MESSAGES):
            try:
                frames = receive_frames(self._socket, 1 + DEFAULT_LIMITS.max_frames)
                if frames is None:
                    break
                message = decode(frames[1:])
                if not isinstance(message, Command):
                    raise WireError("direction", f"{type(message).__name__} is not a request")
                requests.append((frames[0], message))
            except WireError as fault:
                self.rejected[fault.reason] += 1
        return requests

    def answer(self, who: bytes, command_id: int, error: str) -> None:
        """Tell who asked; one that has gone is not waited for."""
        self._own()
        send_frames(self._socket, [who, *encode(Event(answered=command_id, error=error))])

    def close(self) -> None:
        """Close. Idempotent."""
        if self._may_close() and not self._context.closed:
            self._socket.close()
            self._context.term()


def request(run_id: str, command: Command, timeout_s: float) -> str:
    """Ask a live run of this user.

    Waits for: its answer, at most `timeout_s`.

    Returns:
        What went wrong; "" when it took effect.

    Raises:
        StreamError: no such run is alive on this host. DeadlineExceeded: no answer in time.
    """
    path = Path(ipc_endpoint(ipc_directory(run_id), _NAME).removeprefix("ipc://"))
    if not listening(path):
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # made by the question itself when nothing was there
        raise StreamError(f"no run {run_id} of processes is alive on this host: nothing listens at {path}")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"ipc://{path}")
        socket.send_multipart(encode(command))
        if not socket.poll(milliseconds(timeout_s)):
            raise DeadlineExceeded(
                f"run {run_id} did not answer `{command.action} {command.key}` in {timeout_s:g} s"
            )
        event = decode(socket.recv_multipart())
    if not isinstance(event, Event):
        raise StreamError(f"run {run_id} answered with a {type(event).__name__}")
    return event.error
