"""The learner's side of the stream: a data socket and a heartbeat socket, both bound, both ROUTER.

In: Hello, Trajectories, WeightAck, Bye (data) and Heartbeat (heartbeat) from any number of generators.
Out: Welcome, Refused, Grant, Received, VersionNotice, Cancel, Stop (data) and HeartbeatAck (heartbeat), each to
one generator. `poll` and `receive` wait for input, `wake` or their timeout. Owner: the thread that created it
(headway.stream.owned). Whatever a peer sends, nothing is raised: input that is no valid message is counted and dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

import zmq

from headway.errors import WireError
from headway.stream.endpoint import LOOPBACK, Endpoints, bind
from headway.stream.owned import Owned
from headway.stream.security import Guard, ServerSecurity
from headway.stream.transport import (
    SEND_GUARD,
    Context,
    Socket,
    milliseconds,
    open_socket,
    receive_frames,
    send_frames,
)
from headway.stream.waker import Waker
from headway.wire.codec import DEFAULT_LIMITS, Limits, decode, encode
from headway.wire.messages import (
    Bye,
    DataMessage,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Trajectories,
    WeightAck,
)

_log = logging.getLogger(__name__)
_Incoming = Hello | Trajectories | WeightAck | Bye | Heartbeat
_DATA: tuple[type[_Incoming], ...] = (Hello, Trajectories, WeightAck, Bye)
_HEARTBEAT: tuple[type[_Incoming], ...] = (Heartbeat,)


class Arrived(NamedTuple):
    """A message, and its frames as they came: for whoever keeps them."""

    peer: bytes
    message: DataMessage
    frames: list[bytes]


class LearnerSocket(Owned):
    """Both bound sockets of a learner.

    Example:
        with LearnerSocket() as stream:
            publish(stream.endpoints)
            for peer, message in stream.poll(timeout_s=0.5):
                if isinstance(message, Hello):
                    stream.send(peer, Welcome(...))
    """

    def __init__(
        self,
        data: str = LOOPBACK,
        heartbeat: str = LOOPBACK,
        *,
        limits: Limits = DEFAULT_LIMITS,
        security: ServerSecurity | None = None,
        insecure: bool = False,
        heartbeat_s: float | None = None,
        max_messages: int = 256,
    ) -> None:
        """Bind both sockets.

        Args:
            data, heartbeat: endpoints as headway.stream.endpoint.bind takes them.
            limits: of every message.
            security: only clients on its list get in, whatever the address.
            insecure: allow addresses that other machines can reach without it.
            heartbeat_s: as headway.stream.transport.open_socket takes it.
            max_messages: the most that one poll reads from each socket: a flood cannot hold its thread.

        Raises:
            StreamError: an endpoint is refused or taken.
        """
        super().__init__("the learner's stream socket")
        self._limits = limits
        self._max_messages = max_messages
        self.rejected: Counter[str] = Counter()
        """Messages dropped because they were not valid, by WireError reason, "direction" or "identity"."""
        self._heartbeat_s = heartbeat_s
        self._context: Context = zmq.Context()
        self._waker = Waker()
        self.guard: Guard | None = None
        """Counts who was let in and who was not; None without `security`."""
        try:
            self.guard = security.guard(self._context) if security is not None else None
            self._data = self._open(security)
            self._heartbeat = self._open(security)
            self.endpoints = Endpoints(
                data=bind(self._data, data, insecure=insecure),
                heartbeat=bind(self._heartbeat, heartbeat, insecure=insecure),
            )
        except BaseException:
            self._waker.close()
            if self.guard is not None:
                self.guard.close()
            self._context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        for source in (self._data, self._heartbeat, self._waker.fd):
            self._poller.register(source, zmq.POLLIN)

    def _open(self, security: ServerSecurity | None) -> Socket:
        socket = open_socket(
            self._context,
            zmq.ROUTER,
            send_mark=SEND_GUARD,
            limits=self._limits,
            heartbeat_s=self._heartbeat_s,
        )
        if security is not None:
            security.protect(socket)
        # Say that a peer is gone instead of dropping the message.
        socket.router_mandatory = True
        # A generator that reconnects before its old connection is seen to be dead takes its identity over.
        socket.router_handover = True
        return socket

    def poll(self, timeout_s: float) -> list[tuple[bytes, DataMessage]]:
        """As `receive`, without the frames."""
        return [(arrived.peer, arrived.message) for arrived in self.receive(timeout_s)]

    def receive(self, timeout_s: float) -> list[Arrived]:
        """What generators sent, heartbeats first; in order per peer and socket.

        Waits at most `timeout_s` for input or `wake`; returns at once, possibly with nothing, after either.
        """
        self._own()
        messages = self._drain()
        if messages or timeout_s <= 0:
            return messages
        events = dict(self._poller.poll(milliseconds(timeout_s)))
        if self._waker.fd in events:
            self._waker.clear()
        return self._drain()

    def _drain(self) -> list[Arrived]:
        messages: list[Arrived] = []
        for socket, kinds in ((self._heartbeat, _HEARTBEAT), (self._data, _DATA)):
            for _ in range(self._max_messages):
                try:
                    frames = receive_frames(socket, 1 + self._limits.max_frames)
                    if frames is None:
                        break
                    messages.append(self._read(frames, kinds))
                except WireError as fault:
                    self._reject(fault)
        return messages

    def _read(self, frames: list[bytes], kinds: tuple[type[_Incoming], ...]) -> Arrived:
        peer = frames.pop(0)
        message = decode(frames, limits=self._limits)
        if not isinstance(message, kinds):
            raise WireError("direction", f"{type(message).__name__} is not for this socket")
        if message.incarnation.encode() != peer:
            raise WireError("identity", f"peer {peer[:40]!r} speaks for {message.incarnation[:40]!r}")
        return Arrived(peer, message, frames)

    def _reject(self, fault: WireError) -> None:
        self.rejected[fault.reason] += 1
        if self.rejected[fault.reason] == 1:
            _log.warning("dropped a message from a peer (more of this kind are only counted): %s", fault)

    def send(self, peer: bytes, message: DataMessage) -> bool:
        """Send to one generator without blocking; False when it is gone or has stopped reading.

        Args:
            peer: as `poll` gave it (the generator's incarnation).
        """
        self._own()
        socket = self._heartbeat if isinstance(message, HeartbeatAck) else self._data
        return send_frames(socket, [peer, *encode(message)])

    def wake(self) -> None:
        """End the current or the next wait of `poll`. Any thread may call it."""
        self._waker.wake()

    def close(self) -> None:
        """Close both sockets; waits at most a third of a second for what is still to be sent. Idempotent."""
        if self._may_close() and not self._context.closed:
            self._waker.close()
            self._data.close()
            self._heartbeat.close()
            if self.guard is not None:
                self.guard.close()
            self._context.term()

    def __enter__(self) -> LearnerSocket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
