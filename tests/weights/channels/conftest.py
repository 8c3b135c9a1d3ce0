"""Publications with known bytes, fetching threads, and a TCP proxy that cuts connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from headway.types import PolicyVersion
from headway.weights import ChannelReceiver, Payload, PayloadHeader, PayloadKind, Publication
from headway.weights.tcp import TcpSender
from headway.weights.tcp_link import TcpTiming
from headway.weights.tcp_receiver import TcpReceiver

DELTA_BYTES = 1000
QUICK = TcpTiming(alive_s=0.1, stall_s=0.5, gone_s=3.0)
CHUNK = 16 << 10


def whole_bytes(step: int, num_bytes: int) -> bytes:
    return np.random.default_rng(step).integers(0, 256, num_bytes, dtype=np.uint8).tobytes()


def delta_bytes(step: int) -> bytes:
    return whole_bytes(10_000 + step, DELTA_BYTES)


def publication_of(
    step: int, num_bytes: int, *, base: int | None = None, anchor: bool = False
) -> Publication:
    """Version 0.step, state "sSTEP": a whole state of random bytes, and a delta from "sBASE" if asked for."""
    version, state = PolicyVersion(0, step), f"s{step}"
    data = whole_bytes(step, num_bytes)
    cut = num_bytes // 3
    header = PayloadHeader(version, PayloadKind.WHOLE, "", state, num_bytes, state)
    whole = Payload(header, (memoryview(data)[:cut], memoryview(data)[cut:]))
    deltas: tuple[Payload, ...] = ()
    if base is not None:
        delta = PayloadHeader(version, PayloadKind.DELTA, f"s{base}", state, DELTA_BYTES, f"d{step}")
        deltas = (Payload(delta, (memoryview(delta_bytes(step)),)),)
    return Publication(version, state, deltas, header, lambda: whole, anchor)


def bytes_of(header: PayloadHeader) -> bytes:
    step = header.version.step
    return whole_bytes(step, header.num_bytes) if header.kind is PayloadKind.WHOLE else delta_bytes(step)


@pytest.fixture
def payload_bytes() -> Callable[[PayloadHeader], bytes]:
    """The bytes that a publication's payload has, by its header."""
    return bytes_of


@pytest.fixture
def publication() -> Callable[..., Publication]:
    return publication_of


@dataclass
class Reader:
    """A receiver's loop on a thread: fetches whatever brings it forward, until it holds `until`."""

    receiver: ChannelReceiver
    until: int
    deadline_s: float
    fetched: list[PayloadHeader] = field(default_factory=list)
    held: PolicyVersion | None = None
    digest: str = ""
    failures: list[Exception] = field(default_factory=list)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while self.held is None or self.held.step < self.until:
            header = self.receiver.newest(self.held, self.digest)
            if header is None:
                self.receiver.wait(0.2)
                continue
            into = bytearray(header.num_bytes)
            try:
                self.receiver.fetch(header, memoryview(into), self.deadline_s)
            except Exception as error:
                self.failures.append(error)
                if len(self.failures) > 20:
                    return
                continue
            assert bytes(into) == bytes_of(header)
            self.fetched.append(header)
            self.held, self.digest = header.version, header.state_digest

    def join(self, timeout_s: float = 30.0) -> None:
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), f"holds {self.held}, not {self.until}; failures: {self.failures}"
        assert self.held is not None, self.failures
        assert self.held.step >= self.until


@pytest.fixture
def read() -> Callable[..., Reader]:
    def start(receiver: ChannelReceiver, until: int, deadline_s: float = 20.0) -> Reader:
        return Reader(receiver, until, deadline_s)

    return start


def wait_until(true: Callable[[], object], what: object = "", timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, what or "still not so"
        time.sleep(0.01)


@pytest.fixture
def until() -> Callable[..., None]:
    """Wait until `true()` holds, or fail at the deadline: what another thread counts is not there at once."""
    return wait_until


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Closes what it is given at the end, last first."""
    with contextlib.ExitStack() as stack:

        def keep(thing: Any) -> Any:
            stack.callback(thing.close)
            return thing

        yield keep


class Proxy:
    """Forwards connections to a port; cuts each one when the budget of bytes towards the client is used up.

    Attributes:
        port: to connect to. num_cut: connections cut. frozen: forward nothing more, but keep connections open.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.budget: list[int] = []
        self.num_cut = 0
        self.frozen = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                upstream = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, upstream]
                threading.Thread(target=self._pump, args=(client, upstream, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(upstream, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        left = self.budget.pop(0) if counted and self.budget else 1 << 62
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.frozen.is_set():
                    continue
                sink.sendall(data[:left])
                left -= len(data) if counted else 0
                if left <= 0:
                    self.num_cut += 1
                    break
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        for each in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def proxy(closing: Callable[[Any], Any]) -> Callable[[int], Proxy]:
    return lambda target: closing(Proxy(target))


@pytest.fixture(params=["plain", "zeromq"])
def plain(request: pytest.FixtureRequest) -> bool:
    """Whether chunks have connections of their own; else they go through ZeroMQ, as they do with keys."""
    return request.param == "plain"


@pytest.fixture
def sender(plain: bool, closing: Callable[[Any], Any]) -> Callable[..., TcpSender]:
    def make(**options: Any) -> TcpSender:
        settings = {"chunk_bytes": CHUNK, "chunks_in_flight": 8, "timing": QUICK, "plain": plain, **options}
        return closing(TcpSender("run", "manifest", **settings))

    return make


@pytest.fixture
def receiver(closing: Callable[[Any], Any]) -> Callable[..., TcpReceiver]:
    def make(address: str, name: str = "g", **options: Any) -> TcpReceiver:
        settings = {"timing": QUICK, "join_s": 10.0, **options}
        return closing(TcpReceiver(address, "run", "manifest", name=name, **settings))

    return make
