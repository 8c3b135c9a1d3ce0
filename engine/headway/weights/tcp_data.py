"""Plain data connections beside the tcp channel's ZeroMQ control: the bytes, where nothing has to be encrypted.

    request    magic, version, first chunk, length of the payload's key; the key
    record     kind, chunk, digest of the payload up to its end, length; for a chunk its bytes

One request is answered by all chunks from the first on, so TCP's own flow control is the back-pressure, and the
kernel copies straight into the destination: twice what ZeroMQ reaches, which reads into a buffer of its own first.
The server has a thread for each connection; the client is used by whoever fetches. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import socket as sockets
import struct
import threading
from collections import Counter
from enum import IntEnum

from headway.errors import StreamError, WireError
from headway.stream.endpoint import is_local
from headway.types import PolicyVersion
from headway.weights.chunks import Assembly
from headway.weights.serving import Finder, NotYet
from headway.weights.tcp_wire import Want

_log = logging.getLogger(__name__)
MAGIC = b"HWD1"
LOOPBACK_BUFFER_BYTES = 512 << 10
MAX_CONNECTIONS = 256
MAX_KEY_BYTES = 512
HELLO_S = 10.0
_REQUEST = struct.Struct("<4sqqQH")
_RECORD = struct.Struct("<BQQQ")


class Record(IntEnum):
    """What an answer consists of."""

    CHUNK = 0
    HELD = 1
    IDLE = 2
    ABSENT = 3


def open_listener(host: str, port: int) -> sockets.socket:
    """A listening socket whose connections are set up for bulk.

    Raises:
        StreamError: the port is taken, or it is no address of this machine.
    """
    bare = host.strip("[]")
    listener = sockets.socket(sockets.AF_INET6 if ":" in bare else sockets.AF_INET, sockets.SOCK_STREAM)
    try:
        listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        _size_buffers(listener, host)
        listener.bind((bare, port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise StreamError(f"cannot listen for weights on {host}:{port}: {error}") from error
    return listener


def _size_buffers(socket: sockets.socket, host: str) -> None:
    if is_local(f"tcp://{host}:1"):
        # What is in flight stays in the cache. Over a network the kernel must size its buffers by the round trip.
        socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, LOOPBACK_BUFFER_BYTES)
        socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, LOOPBACK_BUFFER_BYTES)


class DataServer:
    """Answers requests for what `find` knows.

    Args:
        host: to listen on; port: 0 for a free one.
        find: as ChunkServer's; called on the connections' threads. changed: notified when it may answer anew.
        alive_s: between two signs of life to a client that waits; stall_s: to get rid of a record.

    Attributes:
        endpoint: for clients; bytes_sent, chunks_sent: handed to the kernel, or about to be;
        rejected: connections ended, by reason.

    Raises:
        StreamError: it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        find: Finder,
        changed: threading.Condition,
        *,
        alive_s: float,
        stall_s: float,
    ) -> None:
        self.bytes_sent = 0
        self.chunks_sent = 0
        self.rejected: Counter[str] = Counter()
        self._find, self._changed = find, changed
        self._alive_s, self._stall_s = alive_s, stall_s
        self._listener = open_listener(host, port)
        self.endpoint = f"tcp://{host}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._connections: set[sockets.socket] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="headway-weights-data", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed; or out of descriptors, which ends relaying here and is noticed by who asks
            with self._lock:
                if len(self._connections) >= MAX_CONNECTIONS or self._closing:
                    self.rejected["connections"] += 1
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: sockets.socket) -> None:
        try:
            connection.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
            connection.settimeout(HELLO_S)
            while not self._closing:
                want = _read_request(connection)
                if want is None:
                    return
                connection.settimeout(self._stall_s)
                self.answer(connection, want)
                connection.settimeout(None)  # a client keeps its connection from one push to the next
        except WireError as fault:
            self.rejected[fault.reason] += 1
            if self.rejected[fault.reason] == 1:
                _log.warning("ended a weights connection (more of this kind are only counted): %s", fault)
        except OSError as error:
            _log.info("a weights connection has ended: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def answer(self, connection: sockets.socket, want: Want) -> None:
        """Send every chunk from `want.index` on, as they become ready; or say that there will be none.

        Raises:
            WireError: there is no such chunk. OSError: the client is gone, or stopped reading for stall_s.
        """
        index = want.index
        while not self._closing:
            source = self._find(Want(want.payload, want.version, index))
            if source is None:
                connection.sendall(_RECORD.pack(Record.ABSENT, index, 0, 0))
                return
            if isinstance(source, NotYet):
                self._hold(connection, index, Record.IDLE if source is NotYet.IDLE else Record.HELD)
                continue
            if index >= source.plan.num_chunks:
                raise WireError("index", f"chunk {index} of {source.plan.num_chunks}")
            if index >= source.num_ready:
                self._hold(connection, index, Record.HELD)
                continue
            digest, body = source.chunk(index)
            with self._lock:  # before it goes, so that what a client has was counted
                self.bytes_sent += body.nbytes
                self.chunks_sent += 1
            _send(connection, _RECORD.pack(Record.CHUNK, index, digest, body.nbytes), body)
            index += 1
            if index == source.plan.num_chunks:
                return

    def _hold(self, connection: sockets.socket, index: int, kind: Record) -> None:
        """Wait for something to change; say that this end lives when nothing does."""
        with self._changed:
            moved = self._changed.wait(self._alive_s)
        if not moved:
            connection.sendall(_RECORD.pack(kind, index, 0, 0))

    def close(self) -> None:
        """End every connection; does not wait for their threads, which then end by themselves."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(sockets.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(sockets.SHUT_RDWR)
        with self._changed:
            self._changed.notify_all()
        self._thread.join(5.0)


class DataClient:
    """One connection to a DataServer, used by one thread.

    Args:
        endpoint: of the server; timeout_s: to connect.

    Raises:
        OSError: it cannot be reached in time.
    """

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self.endpoint = endpoint
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._head = bytearray(_RECORD.size)
        self._socket = sockets.socket(sockets.AF_INET6 if "[" in host else sockets.AF_INET)
        try:
            self._socket.settimeout(timeout_s)
            _size_buffers(self._socket, host)
            self._socket.connect((host.strip("[]"), int(port)))
        except BaseException:
            self._socket.close()
            raise

    def request(self, want: Want) -> None:
        """Ask for every chunk from `want.index` on. Raises OSError."""
        key = want.payload.encode()
        version = want.version
        self._socket.sendall(_REQUEST.pack(MAGIC, version.epoch, version.step, want.index, len(key)) + key)

    def receive(self, assembly: Assembly, timeout_s: float) -> Record:
        """The next record; a chunk is read into its place, verified and kept.

        Raises:
            OSError: cut, or nothing for timeout_s. WireError: it is not the chunk that is due, or damaged.
        """
        self._socket.settimeout(timeout_s)
        self._fill(memoryview(self._head))
        kind, index, digest, size = _RECORD.unpack(self._head)
        if kind != Record.CHUNK:
            if kind not in iter(Record):
                raise WireError("record", f"record of kind {kind} from {self.endpoint}")
            return Record(kind)
        place = assembly.next_chunk()
        if (index, size) != (assembly.num_ready, place.nbytes):
            raise WireError(
                "record", f"chunk {index} of {size} bytes; due is {assembly.num_ready} of {place.nbytes}"
            )
        self._fill(place)
        if not assembly.keep(digest):
            raise WireError("digest", f"chunk {index} from {self.endpoint} does not match its digest")
        return Record.CHUNK

    def _fill(self, into: memoryview) -> None:
        at = 0
        while at < into.nbytes:
            count = self._socket.recv_into(into[at:])
            if not count:
                raise ConnectionResetError(f"{self.endpoint} has closed the connection")
            at += count

    def close(self) -> None:
        """Drop the connection."""
        self._socket.close()


def _read_request(connection: sockets.socket) -> Want | None:
    """None when the client has gone in order."""
    head = _read(connection, _REQUEST.size)
    if not head:
        return None
    magic, epoch, step, index, length = _REQUEST.unpack(head)
    if magic != MAGIC or length > MAX_KEY_BYTES:
        raise WireError("magic", f"a request starts with {head[:4]!r}; expected {MAGIC!r}")
    key = _read(connection, length)
    try:
        return Want(key.decode(), PolicyVersion(epoch, step), index)
    except UnicodeDecodeError:
        raise WireError("magic", "a request's key is no text") from None


def _read(connection: sockets.socket, size: int) -> bytes:
    """Exactly so many bytes; nothing when the other side has closed before the first."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            if data:
                raise WireError("cut", "a request that ends early")
            return b""
        data += more
    return data


def _send(connection: sockets.socket, head: bytes, body: memoryview) -> None:
    """In one call where the kernel takes it all."""
    sent = connection.sendmsg([head, body])
    if sent < len(head):
        connection.sendall(head[sent:])
        sent = len(head)
    if sent - len(head) < body.nbytes:
        connection.sendall(body[sent - len(head) :])
