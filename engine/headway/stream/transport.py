"""The options that all sockets share, and whole messages in and out of a socket without blocking."""

from __future__ import annotations

import math
from collections.abc import Sequence

import zmq

from headway.errors import WireError
from headway.wire.arrays import Frame
from headway.wire.codec import Limits

Socket = zmq.Socket[bytes]
Context = zmq.Context[zmq.Socket[bytes]]

# Credits bound what is outstanding; high-water marks cannot: they count per pipe, and the kernel's buffers
# hold thousands of small messages more. A sender's mark is therefore off: reaching it would look like a dead
# peer. A receiver's mark guards against a flood from a peer that ignores its credits: reading stops, nothing
# is dropped, and the rest waits at the sender, where the credits count it.
SEND_UNBOUNDED = 0
RECEIVE_GUARD = 1000
# For ROUTER sockets, whose peers may freeze without leaving: a peer this far behind is treated as gone.
SEND_GUARD = 10_000
HANDSHAKE_MS = 10_000

# Plain ints: pyzmq converts its enums on every call, which doubles the cost of a small frame.
_EVENTS, _READABLE, _MORE, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE), int(zmq.NOBLOCK)


def open_socket(
    context: Context, kind: int, *, send_mark: int, limits: Limits, heartbeat_s: float | None = None
) -> Socket:
    """A socket with the shared options; the caller binds or connects it.

    Args:
        heartbeat_s: the transport asks an idle peer for a sign of life this often, and drops the connection
            when none comes for twice as long: what a half-open connection looks like. None: it never asks.
    """
    socket = context.socket(kind)
    # Finite, or closing a context with an unsent message to a dead peer waits for ever.
    socket.linger = 300
    socket.sndhwm = send_mark
    socket.rcvhwm = RECEIVE_GUARD
    # libzmq drops the connection of a peer that announces a longer frame, before it allocates it.
    socket.maxmsgsize = max(limits.max_head_bytes, limits.max_frame_bytes)
    # Whoever connects and says nothing, or nothing that libzmq understands, holds a descriptor for so long.
    socket.handshake_ivl = HANDSHAKE_MS
    if heartbeat_s is not None:
        socket.heartbeat_ivl = milliseconds(heartbeat_s)
        socket.heartbeat_timeout = socket.heartbeat_ttl = milliseconds(2 * heartbeat_s)
    # A host that vanishes sends no FIN; without keepalive its pipe would stay for ever.
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 10),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.setsockopt(option, value)
    return socket


def has_input(socket: Socket) -> bool:
    """Whether a message waits: a third of the cost of finding out by zmq.Again."""
    return bool(int(socket.get(_EVENTS)) & _READABLE)


def receive_frames(socket: Socket, max_frames: int) -> list[bytes] | None:
    """The frames of one message, or None when none is there. Never blocks.

    Raises:
        WireError: "frames" when there are more than `max_frames`; the rest is read and dropped, so that the
            next message starts at its first frame.
    """
    if not has_input(socket):
        return None
    try:
        frames = [socket.recv(_NOBLOCK)]
    except zmq.Again:
        return None
    # The parts of a message arrive together: once the first is here, none of these waits.
    while socket.get(_MORE):
        if len(frames) <= max_frames:
            frames.append(socket.recv())
        else:
            socket.recv()
    if len(frames) > max_frames:
        raise WireError("frames", f"a message of more than {max_frames} frames")
    return frames


def send_frames(socket: Socket, frames: Sequence[Frame]) -> bool:
    """Hand one message to the transport without blocking; False when there is no peer to take it."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True


def milliseconds(seconds: float) -> int:
    """For poll: rounded up, so that a short positive wait is not a busy loop."""
    return max(0, math.ceil(seconds * 1000))
