"""A connection of the tcp channel that is made, lost and remade, and the settings that both ends share."""

from __future__ import annotations

import socket as sockets
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import zmq
from zmq.utils.monitor import parse_monitor_message

from headway.config.address import split_tcp
from headway.errors import StreamError
from headway.stream.endpoint import check_connect, is_local
from headway.stream.security import ClientSecurity
from headway.stream.transport import Context, Socket, receive_frames
from headway.weights.tcp_wire import MAX_HEAD_BYTES, Message, encode

MAX_CHUNK_BYTES = 64 << 20
LOOPBACK_BUFFER_BYTES = 256 << 10
ANY_HOST = ("0.0.0.0", "[::]")


@dataclass(frozen=True)
class TcpTiming:
    """Seconds.

    Attributes:
        alive_s: between a receiver's signs of life, and between a relay's.
        stall_s: without a chunk or a sign of life from whom it asks, a receiver complains and asks again.
        gone_s: without a sign of life, the learner forgets a receiver.
    """

    alive_s: float = 1.0
    stall_s: float = 5.0
    gone_s: float = 15.0


DEFAULT_TIMING = TcpTiming()


@dataclass(frozen=True)
class TcpAddress:
    """All that a receiver must know to join; str() and `parse` are inverse.

    Attributes:
        endpoint: tcp://HOST:PORT; data: of the plain data connections, "" when chunks go through ZeroMQ.
        chunk_bytes, chunks_in_flight: of every transfer, the relayed ones included.
    """

    endpoint: str
    chunk_bytes: int
    chunks_in_flight: int
    data: str = ""

    def __str__(self) -> str:
        query = {"chunk_bytes": self.chunk_bytes, "chunks_in_flight": self.chunks_in_flight}
        if self.data:
            query["data"] = split_port(self.data)
        return f"{self.endpoint}?{urllib.parse.urlencode(query)}"

    def reached_by(self, host: str) -> TcpAddress:
        """With `host` in place of one that stands for all addresses of the learner's machine."""
        address = split_tcp(self.endpoint)
        if address is None or address[0] not in ANY_HOST:
            return self
        data = f"tcp://{host}:{split_port(self.data)}" if self.data else ""
        return replace(self, endpoint=f"tcp://{host}:{address[1]}", data=data)

    @classmethod
    def parse(cls, text: str) -> TcpAddress:
        """From str().

        Raises:
            StreamError: not an address of the tcp channel, or sizes that no learner would use.
        """
        endpoint, _, query = text.partition("?")
        fields = dict(urllib.parse.parse_qsl(query))
        try:
            data = f"{endpoint.rpartition(':')[0]}:{int(fields['data'])}" if "data" in fields else ""
            address = cls(endpoint, int(fields["chunk_bytes"]), int(fields["chunks_in_flight"]), data)
        except (KeyError, ValueError) as error:
            raise StreamError(f"{text!r} is no address of the tcp channel ({error})") from None
        if not endpoint.startswith("tcp://"):
            raise StreamError(f"{text!r} is no address of the tcp channel; expected tcp://HOST:PORT?...")
        if not (1 <= address.chunk_bytes <= MAX_CHUNK_BYTES and 1 <= address.chunks_in_flight <= 256):
            raise StreamError(
                f"{text!r}: chunks of 1 to {MAX_CHUNK_BYTES} bytes, 1 to 256 in flight are possible"
            )
        return address


def split_port(endpoint: str) -> int:
    """The port of tcp://HOST:PORT."""
    return int(endpoint.rpartition(":")[2])


def configure(socket: Socket, endpoint: str, max_frame_bytes: int, receive_mark: int) -> None:
    """What every socket of the channel needs; before it binds or connects to `endpoint`."""
    if is_local(endpoint):
        # What is in flight stays in the cache. Over a network the kernel must size its buffers by the round trip.
        socket.sndbuf = socket.rcvbuf = LOOPBACK_BUFFER_BYTES
    socket.linger = 300  # finite: a context with an unsent message to a dead peer would wait for ever
    socket.sndhwm = 512  # a peer that stops reading loses its connection below, not our memory
    socket.rcvhwm = receive_mark
    socket.maxmsgsize = max_frame_bytes
    # A frozen peer's kernel still answers; only its libzmq can show that it lives. Without this, what is queued
    # for it would keep the payload's memory.
    socket.heartbeat_ivl = 2000
    socket.heartbeat_timeout = 10_000


def local_host(endpoint: str) -> str:
    """The address by which this machine reaches `endpoint`, which others there can reach it by.

    Raises:
        StreamError: the endpoint's host is unknown.
    """
    parsed = urllib.parse.urlsplit(endpoint)
    host, port = parsed.hostname or "", parsed.port or 0
    try:
        family, kind, _, _, target = sockets.getaddrinfo(host, port, type=sockets.SOCK_DGRAM)[0]
        with sockets.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket sends nothing here; the kernel picks the route
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise StreamError(f"cannot find the way to {endpoint}: {error}") from error
    return f"[{found}]" if ":" in found else found


class Link:
    """A DEALER to the learner or to a relay. One thread owns it; nothing in it waits.

    Args:
        server: CURVE public key of whom it connects to; empty: the learner's.

    Attributes:
        connected: the handshake of the present connection is done.
        refused: the peer's CURVE refused us, and libzmq will not try again.

    Raises:
        StreamError: another machine's address without keys, or no address at all.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        identity: bytes,
        address: TcpAddress,
        security: ClientSecurity | None,
        insecure: bool,
        server: str = "",
    ) -> None:
        check_connect(endpoint, secured=insecure or security is not None)
        self.endpoint = endpoint
        self.connected = False
        self.refused = False
        self.socket: Socket = context.socket(zmq.DEALER)
        configure(
            self.socket, endpoint, address.chunk_bytes + MAX_HEAD_BYTES, 2 * address.chunks_in_flight + 64
        )
        self.socket.routing_id = identity
        self.socket.immediate = True  # only a live connection takes messages; what is not sent is sent again
        self.socket.reconnect_ivl = 50
        self.socket.reconnect_ivl_max = 1000
        if "[" in endpoint:
            self.socket.ipv6 = True
        if security is not None:
            security.protect(self.socket, server)
        self.monitor: Socket = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        )
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise StreamError(f"cannot connect to {endpoint}: {error}") from error

    def reconnected(self) -> bool:
        """Follow the connection; True when a new one has come up since the last call."""
        fresh = False
        while (report := receive_frames(self.monitor, 2)) is not None:
            event = parse_monitor_message(report)["event"]
            self.connected = fresh = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.refused = self.refused or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        return fresh

    def send(self, message: Message) -> bool:
        """False when there is no connection to take it."""
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Sequence[memoryview] | None:
        """The frames of the next message, not copied, at most three of them; None when none is there."""
        try:
            frames = [self.socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None
        while frames[-1].more:
            if len(frames) == 3:
                frames.pop()  # refused later for its number; the rest of the message is read and dropped
            frames.append(self.socket.recv(copy=False))
        return [frame.buffer for frame in frames]

    def close(self) -> None:
        """Drop the connection and what is unsent."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=300)
