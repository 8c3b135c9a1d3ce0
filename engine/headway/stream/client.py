"""The generator's side of the data stream: one DEALER socket that outlives its learner.

Out: Hello on every connection, Trajectories, WeightAck, Bye. In: Welcome, Refused, Grant, Received, ...
Trajectories are kept until Received names them and go out again, unchanged and in order, after each Welcome, and
so does the last WeightAck; a learner drops what it already has. `receive` waits for a message, `wake` or its timeout.
Owner: the thread that created it (headway.stream.owned); the counters may be read from any thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import zmq

from headway.errors import DeadlineExceeded, StreamError, WireError
from headway.stream.endpoint import Endpoints, check_connect
from headway.stream.link import Link
from headway.stream.owned import Owned
from headway.stream.security import ClientSecurity
from headway.stream.transport import (
    Context,
    milliseconds,
    receive_frames,
    send_frames,
)
from headway.stream.waker import Waker
from headway.wire.arrays import Frame
from headway.wire.codec import DEFAULT_LIMITS, Limits, decode, encode
from headway.wire.messages import (
    Cancel,
    DataMessage,
    Grant,
    Hello,
    Received,
    Refused,
    Stop,
    Trajectories,
    VersionNotice,
    WeightAck,
    Welcome,
)

_log = logging.getLogger(__name__)
_INCOMING = (Welcome, Refused, Grant, Received, VersionNotice, Cancel, Stop)


class _Kept(msgspec.Struct):
    frames: list[Frame]
    num_tokens: int
    ticket_ids: set[int]
    sent: bool = False


class GeneratorSocket(Owned):
    """The data connection of one generator; `connect` makes one.

    Attributes:
        unacked: Trajectories messages not yet named by Received.
        unacked_tokens: sampled tokens in them.
        unsent: those of them that no learner has been sent.
        connected: a learner answered Hello on the present connection.
    """

    def __init__(
        self,
        endpoint: str,
        hello: Callable[[], Hello],
        *,
        max_unacked: int,
        patience_s: float,
        give_up_s: float | None,
        limits: Limits,
        security: ClientSecurity | None,
        heartbeat_s: float | None,
        clock: Callable[[], float],
    ) -> None:
        super().__init__("a generator's stream socket")
        self.endpoint = endpoint
        self.unacked = 0
        self.unacked_tokens = 0
        self.unsent = 0
        self.connected = False
        self._hello = hello
        self._hello_due = False
        self._max_unacked = max_unacked
        self._patience_s = patience_s
        self._give_up_s = give_up_s
        self._limits = limits
        self._clock = clock
        self._alone_since = clock()
        self._said_alone = False
        self._kept: dict[int, _Kept] = {}
        self._watched: set[int] = set()
        self._others: list[list[Frame]] = []
        self._last_ack: list[Frame] | None = None
        self._heartbeat_s = heartbeat_s
        self._security = security
        self._context: Context = zmq.Context()
        self._waker = Waker()
        try:
            self._link = self._open()
        except BaseException:
            self._waker.close()
            self._context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        for source in (self._link.socket, self._link.monitor, self._waker.fd):
            self._poller.register(source, zmq.POLLIN)

    def _open(self) -> Link:
        return Link(
            self._context,
            self.endpoint,
            self._hello().incarnation.encode(),
            limits=self._limits,
            security=self._security,
            heartbeat_s=self._heartbeat_s,
        )

    @classmethod
    def connect(
        cls,
        endpoints: Endpoints,
        hello: Callable[[], Hello],
        *,
        max_unacked: int = 1 << 16,
        patience_s: float = 10.0,
        give_up_s: float | None = None,
        limits: Limits = DEFAULT_LIMITS,
        security: ClientSecurity | None = None,
        insecure: bool = False,
        heartbeat_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> GeneratorSocket:
        """Connect to a learner, which may start later; the connection is made, and remade, inside `receive`.

        Args:
            endpoints: the learner's; the data endpoint is used.
            hello: called for each new connection; its `incarnation` is this socket's identity.
            max_unacked: Trajectories messages that the credits can make outstanding; more is a bug of ours.
            patience_s: without a learner for so long, say so once in the log.
            give_up_s: without a learner for so long, `receive` raises DeadlineExceeded. None: never.
            security: needed where the learner demands keys; insecure: go to another machine without.
            heartbeat_s: as headway.stream.transport.open_socket takes it.

        Raises:
            StreamError: another machine's address, with neither keys nor `insecure`.
        """
        check_connect(endpoints.data, secured=security is not None or insecure)
        return cls(
            endpoints.data,
            hello,
            max_unacked=max_unacked,
            patience_s=patience_s,
            give_up_s=give_up_s,
            limits=limits,
            security=security,
            heartbeat_s=heartbeat_s,
            clock=clock,
        )

    def watch(self, fd: int) -> None:
        """Let `receive` return, with nothing, when this descriptor turns readable too."""
        self._own()
        self._watched.add(fd)
        self._poller.register(fd, zmq.POLLIN)

    def send(self, message: DataMessage) -> bool:
        """Send, or keep for when a learner is there; False in the second case. Never blocks.

        Raises:
            StreamError: more than `max_unacked` Trajectories are outstanding, or a `seq` is used twice.
            WireError: the message cannot be encoded.
        """
        self._own()
        self._watch()
        frames = encode(message)
        if isinstance(message, WeightAck):
            # Whatever became of an earlier one, the learner must know what is in force now.
            self._last_ack = frames
            return self.connected and send_frames(self._link.socket, frames)
        if not isinstance(message, Trajectories):
            if self.connected and send_frames(self._link.socket, frames):
                return True
            self._others.append(frames)
            return False
        if len(self._kept) >= self._max_unacked or message.seq in self._kept:
            raise StreamError(
                f"Trajectories {message.seq} with {len(self._kept)} unacknowledged: "
                f"at most {self._max_unacked}, each seq once"
            )
        ticket_ids = {item.ticket_id for item in (*message.trajectories, *message.failures)}
        kept = _Kept(frames, sum(item.num_sampled for item in message.trajectories), ticket_ids)
        self._kept[message.seq] = kept
        self.unacked += 1
        self.unacked_tokens += kept.num_tokens
        self.unsent += 1
        return self.connected and self._send_kept(kept)

    def _send_kept(self, kept: _Kept) -> bool:
        if not send_frames(self._link.socket, kept.frames):
            return False
        if not kept.sent:
            kept.sent = True
            self.unsent -= 1
        return True

    def receive(self, timeout_s: float) -> list[DataMessage]:
        """What the learner sent, in order; waits at most `timeout_s` for it or for `wake`.

        Connects, says Hello and sends again what is unacknowledged on the way; call it regularly.

        Raises:
            DeadlineExceeded: no learner for `give_up_s`.
        """
        self._own()
        deadline = self._clock() + timeout_s
        while True:
            self._watch()
            messages = self._drain()
            self._complain()
            left = deadline - self._clock()
            if messages or left <= 0:
                return messages
            # While Hello could not be sent yet, the socket turning writable is what to wait for.
            self._poller.modify(self._link.socket, zmq.POLLIN | (zmq.POLLOUT if self._hello_due else 0))
            events = dict(self._poller.poll(milliseconds(min(left, 1.0))))
            if self._waker.fd in events:
                self._waker.clear()
            if self._waker.fd in events or self._watched & events.keys():
                self._watch()
                return self._drain()

    def _watch(self) -> None:
        """Follow the connection: on a new one say Hello first; Trajectories wait for the Welcome."""
        for made in self._link.news():
            self._hello_due = made
            if self.connected:
                self._alone_since = self._clock()
            self.connected = False
        if self._hello_due and send_frames(self._link.socket, encode(self._hello())):
            self._hello_due = False

    def _drain(self) -> list[DataMessage]:
        messages: list[DataMessage] = []
        for _ in range(256):
            try:
                frames = receive_frames(self._link.socket, self._limits.max_frames)
                if frames is None:
                    break
                message = decode(frames, limits=self._limits)
                if not isinstance(message, _INCOMING):
                    raise WireError("direction", f"{type(message).__name__} is not for a generator")
            except WireError as fault:
                _log.warning("dropped a message from the learner at %s: %s", self.endpoint, fault)
                continue
            if isinstance(message, Welcome):
                self._welcome()
            elif isinstance(message, Received):
                self._acknowledge(message.seq)
            messages.append(message)
        return messages

    def _welcome(self) -> None:
        self.connected = True
        self._said_alone = False
        if self._last_ack is not None:
            send_frames(self._link.socket, self._last_ack)
        self._others = [frames for frames in self._others if not send_frames(self._link.socket, frames)]
        for kept in self._kept.values():
            self._send_kept(kept)

    def _acknowledge(self, seq: int) -> None:
        kept = self._kept.pop(seq, None)
        if kept is not None:
            self.unacked -= 1
            self.unacked_tokens -= kept.num_tokens
            self.unsent -= not kept.sent

    def _complain(self) -> None:
        if self.connected:
            return
        alone_s = self._clock() - self._alone_since
        if self._give_up_s is not None and alone_s >= self._give_up_s:
            raise DeadlineExceeded(f"no learner at {self.endpoint} for {alone_s:.1f} s; is it running?")
        if alone_s >= self._patience_s and not self._said_alone:
            self._said_alone = True
            _log.warning("no learner yet at %s after %.1f s; still trying", self.endpoint, alone_s)

    @property
    def unacked_tickets(self) -> set[int]:
        """Tickets of which a member is in a message that is not acknowledged."""
        return {ticket_id for kept in self._kept.values() for ticket_id in kept.ticket_ids}

    def reconnect(self, why: str) -> None:
        """Give the present connection up and make a new one: the other end has stopped answering on it."""
        self._own()
        _log.warning("connecting to the learner at %s anew: %s", self.endpoint, why)
        if self.connected:
            self._alone_since = self._clock()
        self.connected = self._hello_due = False
        for source in (self._link.socket, self._link.monitor):
            self._poller.unregister(source)
        self._link.close(linger_ms=0)
        self._link = self._open()
        for source in (self._link.socket, self._link.monitor):
            self._poller.register(source, zmq.POLLIN)

    def wake(self) -> None:
        """End the current or the next wait of `receive`. Any thread may call it."""
        self._waker.wake()

    def close(self) -> int:
        """Close within a second, whatever became of the learner; returns how many messages stay unacked."""
        if self._may_close() and not self._context.closed:
            if self.unacked:
                _log.warning(
                    "closing with %d unacknowledged messages (%d never sent; %d sampled tokens)",
                    self.unacked,
                    self.unsent,
                    self.unacked_tokens,
                )
            self._waker.close()
            self._link.close()
            self._context.term()
        return self.unacked

    def __enter__(self) -> GeneratorSocket:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
