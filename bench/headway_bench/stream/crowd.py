"""A thousand simulated generators on one thread, each with sockets of its own, and how long their tickets take."""

from __future__ import annotations

import json
import random
import resource
import time
from dataclasses import dataclass, field

import zmq

from headway.errors import RunFailed
from headway.stream import Endpoints
from headway.stream.transport import open_socket, receive_frames, send_frames
from headway.types import Ticket
from headway.wire import DEFAULT_LIMITS, decode, encode
from headway.wire.messages import (
    Grant,
    Received,
    Stop,
    Trajectories,
    VersionNotice,
    Welcome,
)
from headway_bench.stream.content import Content, heartbeat, hello, weight_ack

BEAT_S = 2.0
TURN_MS = 10
WARM_S = 3.0


@dataclass
class _Simulated:
    """One of a thousand: its sockets, its ticket, and when it will have finished it."""

    name: str
    index: int
    data: zmq.Socket[bytes]
    beats: zmq.Socket[bytes]
    welcome: bool = False
    seq: int = 0
    num_beats: int = 0
    next_beat_s: float = 0.0
    waiting_since_s: float | None = None
    work: list[tuple[float, Ticket]] = field(default_factory=list[tuple[float, Ticket]])


class Crowd:
    """Simulated generators on one thread. Each holds a ticket at a time and thinks for a while about it.

    The latency of a ticket is from sending the message that ends one to reading the Grant of the next.
    """

    def __init__(self, endpoints: Endpoints, tokens: int, num: int, think_s: float) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        self._content = Content(tokens)
        self._think_s = think_s
        self._rng = random.Random(0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 3 * num + 16)
        self._poller = zmq.Poller()
        self._peers: dict[zmq.Socket[bytes], _Simulated] = {}
        self._all: list[_Simulated] = []
        self.latencies_s: list[float] = []
        self.stopped = False
        for index in range(num):
            name = f"g{index}-crowd"
            data, beats = (self._open(name, endpoint) for endpoint in (endpoints.data, endpoints.heartbeat))
            peer = _Simulated(name, index, data, beats)
            self._peers[data] = peer
            self._listen(peer)
            self._all.append(peer)
        now = time.monotonic()
        for peer in self._all:  # they arrive over one interval, as their heartbeats will
            peer.next_beat_s = now + self._rng.uniform(0.0, BEAT_S)

    def _open(self, name: str, endpoint: str) -> zmq.Socket[bytes]:
        socket = open_socket(self._context, zmq.DEALER, send_mark=0, limits=DEFAULT_LIMITS)
        socket.routing_id = name.encode()
        socket.connect(endpoint)
        return socket

    def _listen(self, peer: _Simulated) -> None:
        """Who works hears of nothing that cannot wait: polling a thousand sockets would be what is measured."""
        peer.waiting_since_s = time.monotonic()
        self._poller.register(peer.data, zmq.POLLIN)

    def turn(self) -> None:
        """Send what is due, read what has come."""
        now = time.monotonic()
        for peer in self._all:
            if peer.next_beat_s <= now:
                peer.next_beat_s = now + BEAT_S
                if not peer.welcome:
                    send_frames(peer.data, encode(hello(peer.name, peer.index)))
                    continue
                peer.num_beats += 1
                while receive_frames(peer.beats, DEFAULT_LIMITS.max_frames) is not None:
                    pass
                send_frames(peer.beats, encode(heartbeat(peer.name, peer.num_beats)))
            while peer.work and peer.work[0][0] <= now:
                self._finish(peer, peer.work.pop(0)[1])
        for socket, _ in self._poller.poll(TURN_MS):
            self._hear(socket)

    def _finish(self, peer: _Simulated, ticket: Ticket) -> None:
        peer.seq += 1
        members = [
            self._content.trajectory(ticket, member, peer.name) for member in range(ticket.num_members)
        ]
        message = Trajectories(
            incarnation=peer.name, seq=peer.seq, trajectories=members, failures=[], generated=0
        )
        frames = encode(message)
        if not peer.work:
            self._listen(peer)
        send_frames(peer.data, frames)

    def _hear(self, socket: zmq.Socket[bytes]) -> None:
        peer = self._peers[socket]
        while (frames := receive_frames(socket, DEFAULT_LIMITS.max_frames)) is not None:
            message = decode(frames)
            now = time.monotonic()
            if isinstance(message, Welcome):
                peer.welcome = True
                send_frames(peer.data, encode(weight_ack(peer.name)))
            elif isinstance(message, Stop):
                self.stopped = True
            elif isinstance(message, Grant):
                if peer.waiting_since_s is not None:
                    self.latencies_s.append(now - peer.waiting_since_s)
                    peer.waiting_since_s = None
                    self._poller.unregister(socket)
                for ticket in message.tickets:
                    peer.work.append((now + self._rng.uniform(0.5, 1.5) * self._think_s, ticket))
                peer.work.sort(key=lambda item: item[0])
            elif not isinstance(message, Received | VersionNotice):
                raise RunFailed(f"simulated generator {peer.name} heard {message}")

    def close(self) -> None:
        """Close every socket."""
        self._context.destroy(linger=0)


def crowd(endpoints: Endpoints, tokens: int, num: int, think_s: float, seconds: float) -> None:
    """Run a crowd; print its latencies, without those of the time in which everybody arrives at once."""
    peers = Crowd(endpoints, tokens, num, think_s)
    warm_s = time.monotonic() + WARM_S + think_s
    while time.monotonic() < warm_s:
        peers.turn()
    peers.latencies_s.clear()
    began = time.monotonic()
    while time.monotonic() - began < seconds and not peers.stopped:
        peers.turn()
    elapsed_s = time.monotonic() - began
    print(json.dumps({"latencies_s": peers.latencies_s, "elapsed_s": elapsed_s}), flush=True)
    peers.close()
