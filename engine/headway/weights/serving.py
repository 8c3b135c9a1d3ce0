"""Answering Wants: what the learner and every relaying receiver do alike on their bound socket.

One thread owns it (the channel's node). It never waits and never raises for what a peer sends: a Want that cannot
be meant is a WireError for the caller to count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import zmq

from headway.errors import WireError
from headway.stream.transport import Socket
from headway.weights.chunks import ChunkPlan
from headway.weights.tcp_wire import Absent, Chunk, Held, Message, Want, encode

MAX_HELD = 256
"""Wants kept for one peer; an honest one has at most its chunks in flight outstanding."""
MAX_PEERS = 4096


class ChunkSource(Protocol):
    """A payload of which chunks 0 to num_ready - 1 can be given."""

    @property
    def plan(self) -> ChunkPlan:
        """Where its chunks lie."""
        ...

    @property
    def num_ready(self) -> int:
        """Chunks that can be given."""
        ...

    def chunk(self, index: int) -> tuple[int, memoryview]:
        """Digest of everything up to the end of chunk `index`, and the chunk."""
        ...


class NotYet(Enum):
    """The answers of a finder whose payload may still come."""

    FETCHING = "its generator is fetching this payload or another"
    IDLE = "its generator has yet to fetch it"


Finder = Callable[[Want], "ChunkSource | NotYet | None"]


class ChunkServer:
    """Sends chunks of what `find` knows to whoever wants them.

    Args:
        socket: a ROUTER with router_mandatory; find: the source of what is wanted, NotYet, or None: never.

    Attributes:
        bytes_sent, chunks_sent: handed to the transport; num_refused: Wants beyond what a peer may have open.
    """

    def __init__(self, socket: Socket, find: Finder) -> None:
        self.bytes_sent = 0
        self.chunks_sent = 0
        self.num_refused = 0
        self._socket = socket
        self._find = find
        self._held: dict[bytes, deque[Want]] = {}

    def want(self, peer: bytes, want: Want) -> None:
        """Answer a Want, or hold it until `advance`.

        Raises:
            WireError: "index": the payload has no such chunk.
        """
        queue = self._held.get(peer)
        if queue and queue[0].payload != want.payload:
            del self._held[peer]  # it has moved on
            queue = None
        if queue or not self._answer(peer, want):
            self._hold(peer, want)

    def _hold(self, peer: bytes, want: Want) -> None:
        if peer not in self._held and len(self._held) >= MAX_PEERS:
            self.num_refused += 1
            return
        queue = self._held.setdefault(peer, deque())
        if len(queue) >= MAX_HELD:
            self.num_refused += 1
        elif want not in queue:
            queue.append(want)

    def _answer(self, peer: bytes, want: Want) -> bool:
        """False when it has to wait."""
        source = self._find(want)
        if source is None:
            self.send(peer, Absent(want.payload))
            return True
        if isinstance(source, NotYet):
            return False
        if not 0 <= want.index < source.plan.num_chunks:
            raise WireError("index", f"chunk {want.index} of {source.plan.num_chunks}")
        if want.index >= source.num_ready:
            return False
        digest, body = source.chunk(want.index)
        if self.send(peer, Chunk(want.payload, want.index, digest), body):
            self.bytes_sent += body.nbytes
            self.chunks_sent += 1
        else:
            self.num_refused += 1
        return True

    def advance(self) -> None:
        """Answer what has been held for; call it when chunks have come or a payload has gone."""
        for peer, queue in list(self._held.items()):
            while queue:
                try:
                    if not self._answer(peer, queue[0]):
                        break
                except WireError:
                    self.num_refused += 1
                queue.popleft()
            if not queue:
                del self._held[peer]

    def reassure(self) -> None:
        """Tell every peer whose Wants are held that this relay is alive."""
        for peer, queue in list(self._held.items()):
            fetching = self._find(queue[0]) is not NotYet.IDLE
            if not self.send(peer, Held(queue[0].payload, fetching)):
                del self._held[peer]

    def forget(self, peer: bytes) -> None:
        """Drop what is held for a peer."""
        self._held.pop(peer, None)

    def send(self, peer: bytes, message: Message, body: memoryview | None = None) -> bool:
        """Without blocking; False when the peer is gone or has stopped reading."""
        try:
            if body is None:
                self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)
            else:
                # No copy: libzmq reads the payload's own memory, which a Payload's holder never changes.
                self._socket.send_multipart([peer, encode(message), body], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True
