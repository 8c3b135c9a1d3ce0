"""Memory lent to a socket arrives as it was, and may be let go of as soon as it has been sent."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from headway.types import PolicyVersion
from headway.weights import tcp_data
from headway.weights.chunks import Assembly, ChunkedPayload, ChunkPlan
from headway.weights.tcp_data import DataClient, DataServer, Record
from headway.weights.tcp_lend import COPIED_TAIL_BYTES, PIPE_BYTES, Lender
from headway.weights.tcp_wire import Want

CHUNK = 1 << 20
SIZE = COPIED_TAIL_BYTES + 6 * CHUNK + 12_345


@pytest.fixture
def lender() -> Iterator[Lender]:
    made = Lender()
    yield made
    made.close()


@pytest.fixture
def memory() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


def lent_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is lent from now on."""
    sizes: list[int] = []
    send = Lender.send

    def noted(self: Lender, socket: socket.socket, body: memoryview) -> None:
        sizes.append(body.nbytes)
        send(self, socket, body)

    monkeypatch.setattr(Lender, "send", noted)
    return sizes


def fetch(server: DataServer, size: int) -> bytearray:
    into = bytearray(size)
    whole = Assembly(memoryview(into), ChunkPlan(size, CHUNK))
    client = DataClient(server.endpoint, 5.0)
    try:
        client.request(Want("p", PolicyVersion(0, 1), 0))
        while not whole.complete:
            assert client.receive(whole, 5) is Record.CHUNK
    finally:
        client.close()
    return into


@pytest.fixture
def server(memory: np.ndarray) -> Iterator[DataServer]:
    found = ChunkedPayload([memoryview(memory)], SIZE, CHUNK)
    made = DataServer("127.0.0.1", 0, lambda want: found, threading.Condition(), alive_s=0.05, stall_s=5.0)
    yield made
    made.close()


@pytest.mark.parametrize("size", [1, 4095, 4097, PIPE_BYTES - 1, PIPE_BYTES + 1, 3 * PIPE_BYTES + 7])
@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_bytes_of_any_place_and_size_arrive(
    lender: Lender, memory: np.ndarray, size: int, offset: int
) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(5.0)
        got = bytearray(size)

        def read() -> None:
            at = 0
            while at < size:
                at += there.recv_into(memoryview(got)[at:])

        reader = threading.Thread(target=read)
        reader.start()
        lender.send(here, memoryview(memory)[offset : offset + size])
        reader.join(5.0)
        assert got == memory[offset : offset + size].tobytes()


def test_all_but_the_tail_of_a_payload_is_lent(
    server: DataServer, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = lent_bytes(monkeypatch)
    assert fetch(server, SIZE) == memory.tobytes()
    assert sum(sizes) == 6 * CHUNK
    assert SIZE - sum(sizes) >= COPIED_TAIL_BYTES


def test_a_payload_may_change_as_soon_as_it_has_been_sent(
    server: DataServer, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = memory.tobytes()
    answer = DataServer.answer

    def then_overwrite(self: DataServer, *args: object) -> None:
        answer(self, *args)  # type: ignore[arg-type]
        memory.fill(0)

    monkeypatch.setattr(DataServer, "answer", then_overwrite)
    assert fetch(server, SIZE) == before


def test_memory_that_a_fetch_still_writes_is_copied(
    server: DataServer, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = lent_bytes(monkeypatch)
    whole, staged = ChunkedPayload([memoryview(memory)], SIZE, CHUNK), bytearray(SIZE)
    assembly = Assembly(memoryview(staged), ChunkPlan(SIZE, CHUNK))
    for index in range(whole.plan.num_chunks):
        assembly.add(*whole.chunk(index))
    monkeypatch.setattr(server, "_find", lambda want: assembly)
    assert fetch(server, SIZE) == memory.tobytes()
    assert sizes == []


def test_a_system_without_the_call_copies(memory: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Lender:
        raise OSError(errno.EPERM, "filtered")

    monkeypatch.setattr(tcp_data, "Lender", refused)
    found = ChunkedPayload([memoryview(memory)], SIZE, CHUNK)
    server = DataServer("127.0.0.1", 0, lambda want: found, threading.Condition(), alive_s=0.05, stall_s=5.0)
    try:
        assert fetch(server, SIZE) == memory.tobytes()
    finally:
        server.close()


def test_a_peer_that_does_not_read_ends_the_sending_in_time(lender: Lender, memory: np.ndarray) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(0.05)
        with pytest.raises(TimeoutError, match=r"did not read for 0\.05 s"):
            lender.send(here, memoryview(memory))


def test_a_peer_that_has_gone_ends_the_sending(lender: Lender, memory: np.ndarray) -> None:
    here, there = socket.socketpair()
    with here:
        here.settimeout(5.0)
        there.close()
        with pytest.raises(OSError, match=r"[Bb]roken pipe"):
            lender.send(here, memoryview(memory))
