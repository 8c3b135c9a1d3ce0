"""The control channel: the supervisor binds, its learner connects. Events one way, Commands the other.

Same codec as the data stream. The supervisor starts first and outlives learners, so it owns the endpoint; a
restarted learner takes the old one's place.
"""

from __future__ import annotations

import logging
from collections import Counter

import zmq

from headway.errors import WireError
from headway.stream.endpoint import LOOPBACK, bind
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
from headway.wire.codec import DEFAULT_LIMITS, decode, encode
from headway.wire.messages import Command, Event

_log = logging.getLogger(__name__)
_LEARNER = b"learner"
_MAX_MESSAGES = 256


class _Channel(Owned):
    """What both ends share: a socket, a waker, and input that never raises."""

    def __init__(self, name: str, kind: int) -> None:
        super().__init__(name)
        self.rejected: Counter[str] = Counter()
        """Messages dropped because they were not valid, by reason."""
        self._context: Context = zmq.Context()
        self._socket: Socket = open_socket(self._context, kind, send_mark=SEND_GUARD, limits=DEFAULT_LIMITS)
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waker.fd, zmq.POLLIN)

    def _wait(self, timeout_s: float) -> None:
        events = dict(self._poller.poll(milliseconds(timeout_s)))
        if self._waker.fd in events:
            self._waker.clear()

    def _reject(self, fault: WireError) -> None:
        self.rejected[fault.reason] += 1
        if self.rejected[fault.reason] == 1:
            _log.warning(
                "dropped a message on %s (more of this kind are only counted): %s", self._name, fault
            )

    def wake(self) -> None:
        """End the current or the next wait of `poll`. Any thread may call it."""
        self._waker.wake()

    def close(self) -> None:
        """Close; waits at most a third of a second for what is still to be sent. Idempotent."""
        if self._may_close() and not self._context.closed:
            self._waker.close()
            self._socket.close()
            self._context.term()


class SupervisorControl(_Channel):
    """The supervisor's end. `endpoint` is what the learner is told to connect to."""

    def __init__(self, endpoint: str = LOOPBACK) -> None:
        """Bind.

        Raises:
            StreamError: the endpoint is refused or taken.
        """
        super().__init__("the supervisor's control socket", zmq.ROUTER)
        self._socket.router_mandatory = True
        self._socket.router_handover = True
        try:
            self.endpoint = bind(self._socket, endpoint)
        except BaseException:
            self._waker.close()
            self._context.destroy(linger=0)
            raise

    def poll(self, timeout_s: float) -> list[Event]:
        """Events in order; waits at most `timeout_s` for one or for `wake`."""
        self._own()
        events = self._drain()
        if events or timeout_s <= 0:
            return events
        self._wait(timeout_s)
        return self._drain()

    def _drain(self) -> list[Event]:
        events: list[Event] = []
        for _ in range(_MAX_MESSAGES):
            try:
                frames = receive_frames(self._socket, 1 + DEFAULT_LIMITS.max_frames)
                if frames is None:
                    break
                if frames[0] != _LEARNER:
                    raise WireError("identity", f"peer {frames[0][:40]!r} is not the learner")
                message = decode(frames[1:])
                if not isinstance(message, Event):
                    raise WireError("direction", f"{type(message).__name__} is not for the supervisor")
                events.append(message)
            except WireError as fault:
                self._reject(fault)
        return events

    def send(self, command: Command) -> bool:
        """Send without blocking; False when no learner is connected."""
        self._own()
        return send_frames(self._socket, [_LEARNER, *encode(command)])


class LearnerControl(_Channel):
    """The learner's end. Events sent before the connection stands are queued."""

    def __init__(self, endpoint: str) -> None:
        super().__init__("the learner's control socket", zmq.DEALER)
        self.dropped = 0
        """Events that nobody took: the supervisor has stopped reading."""
        self._socket.routing_id = _LEARNER
        self._socket.connect(endpoint)

    def poll(self, timeout_s: float) -> list[Command]:
        """Commands in order; waits at most `timeout_s` for one or for `wake`."""
        self._own()
        commands = self._drain()
        if commands or timeout_s <= 0:
            return commands
        self._wait(timeout_s)
        return self._drain()

    def _drain(self) -> list[Command]:
        commands: list[Command] = []
        for _ in range(_MAX_MESSAGES):
            try:
                frames = receive_frames(self._socket, DEFAULT_LIMITS.max_frames)
                if frames is None:
                    break
                message = decode(frames)
                if not isinstance(message, Command):
                    raise WireError("direction", f"{type(message).__name__} is not for the learner")
                commands.append(message)
            except WireError as fault:
                self._reject(fault)
        return commands

    def send(self, event: Event) -> bool:
        """Send without blocking; False, and counted, when the queue is full."""
        self._own()
        sent = send_frames(self._socket, encode(event))
        self.dropped += not sent
        return sent
