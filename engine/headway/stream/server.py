"""The learner's side of the stream: a data socket and a heartbeat socket, both bound, both ROUTER.

In: Hello, Trajectories, WeightAck, Bye (data) and Heartbeat (heartbeat) from any number of generators.
Out: Welcome, Refused, Grant, Received, VersionNotice, Cancel, Stop to one generator each.
`poll` waits for input, `wake` or its timeout. Owner: the thread that created it (headway.stream.owned).
Whatever a peer sends, nothing is raised: input that is no valid message is counted and dropped.
"""

from __future__ import annotations

import logging
from collections import Counter

import zmq

from headway.errors import WireError
from headway.stream.endpoint import LOOPBACK, Endpoints, bind
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
from headway.stream.waker import Waker
from headway.wire.codec import DEFAULT_LIMITS, Limits, decode, encode
from headway.wire.messages import Bye, DataMessage, Heartbeat, Hello, Trajectories, WeightAck

_log = logging.getLogger(__name__)
_Incoming = Hello | Trajectories | WeightAck | Bye | Heartbeat
_DATA: tuple[type[_Incoming], ...] = (Hello, Trajectories, WeightAck, Bye)
_HEARTBEAT: tuple[type[_Incoming], ...] = (Heartbeat,)


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
        insecure: bool = False,
        max_messages: int = 256,
    ) -> None:
        """Bind both sockets.

        Args:
            data, heartbeat: endpoints as headway.stream.endpoint.bind takes them.
            limits: of every message.
            insecure: allow addresses that other machines can reach.
            max_messages: the most that one poll reads from each socket: a flood cannot hold its thread.

        Raises:
            StreamError: an endpoint is refused or taken.
        """
        super().__init__("the learner's stream socket")
        self._limits = limits
        self._max_messages = max_messages
        self.rejected: Counter[str] = Counter()
        """Messages dropped because they were not valid, by WireError reason, "direction" or "identity"."""
        self._context: Context = zmq.Context()
        self._waker = Waker()
        try:
            self._data = self._open()
            self._heartbeat = self._open()
            self.endpoints = Endpoints(
                data=bind(self._data, data, insecure=insecure),
                heartbeat=bind(self._heartbeat, heartbeat, insecure=insecure),
            )
        except BaseException:
            self._waker.close()
            self._context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        for source in (self._data, self._heartbeat, self._waker.fd):
            self._poller.register(source, zmq.POLLIN)

    def _open(self) -> Socket:
        socket = open_socket(self._context, zmq.ROUTER, send_mark=SEND_GUARD, limits=self._limits)
        # Say that a peer is gone instead of dropping the message.
        socket.router_mandatory = True
        # A generator that reconnects before its old connection is seen to be dead takes its identity over.
        socket.router_handover = True
        return socket

    def poll(self, timeout_s: float) -> list[tuple[bytes, DataMessage]]:
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

    def _drain(self) -> list[tuple[bytes, DataMessage]]:
        messages: list[tuple[bytes, DataMessage]] = []
        for socket, kinds in ((self._heartbeat, _HEARTBEAT), (self._data, _DATA)):
            for _ in range(self._max_messages):
                try:
                    frames = receive_frames(socket, 1 + self._limits.max_frames)
                    if frames is None:
                        break
                    messages.append((frames[0], self._read(frames, kinds)))
                except WireError as fault:
                    self._reject(fault)
        return messages

    def _read(self, frames: list[bytes], kinds: tuple[type[_Incoming], ...]) -> DataMessage:
        peer = frames[0]
        message = decode(frames[1:], limits=self._limits)
        if not isinstance(message, kinds):
            raise WireError("direction", f"{type(message).__name__} is not for this socket")
        if message.incarnation.encode() != peer:
            raise WireError("identity", f"peer {peer[:40]!r} speaks for {message.incarnation[:40]!r}")
        return message

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
        return send_frames(self._data, [peer, *encode(message)])

    def wake(self) -> None:
        """End the current or the next wait of `poll`. Any thread may call it."""
        self._waker.wake()

    def close(self) -> None:
        """Close both sockets; waits at most a third of a second for what is still to be sent. Idempotent."""
        if self._may_close() and not self._context.closed:
            self._waker.close()
            self._data.close()
            self._heartbeat.close()
            self._context.term()

    def __enter__(self) -> LearnerSocket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
