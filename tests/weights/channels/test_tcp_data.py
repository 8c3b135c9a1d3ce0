"""The plain data connections: rubbish ends its own connection, and everything that waits is bounded."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from headway.errors import StreamError, WireError
from headway.types import PolicyVersion
from headway.weights import Publication, tcp_data
from headway.weights.chunks import Assembly, ChunkedPayload, ChunkPlan
from headway.weights.serving import NotYet
from headway.weights.tcp_data import MAGIC, DataClient, DataServer, Record
from headway.weights.tcp_link import TcpAddress, split_port
from headway.weights.tcp_wire import Want

Start = Callable[..., Any]
DATA = bytes(range(250)) * 40
CHUNK = 1000
REQUEST = struct.Struct("<4sqqQH")


class Shop:
    """What a server finds: set by the test."""

    def __init__(self) -> None:
        self.found: Any = ChunkedPayload([memoryview(DATA)], len(DATA), CHUNK)
        self.changed = threading.Condition()

    def find(self, want: Want) -> Any:
        return self.found

    def put(self, found: Any) -> None:
        with self.changed:
            self.found = found
            self.changed.notify_all()


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def server(shop: Shop) -> Iterator[DataServer]:
    made = DataServer("127.0.0.1", 0, shop.find, shop.changed, alive_s=0.05, stall_s=1.0)
    yield made
    made.close()


@pytest.fixture
def client(server: DataServer) -> Iterator[DataClient]:
    made = DataClient(server.endpoint, 5.0)
    yield made
    made.close()


def ask(index: int = 0, key: str = "p") -> Want:
    return Want(key, PolicyVersion(0, 1), index)


def assembly() -> tuple[bytearray, Assembly]:
    into = bytearray(len(DATA))
    return into, Assembly(memoryview(into), ChunkPlan(len(DATA), CHUNK))


def test_chunks_come_in_order_from_any_start_over_one_connection(
    client: DataClient, server: DataServer
) -> None:
    into, whole = assembly()
    client.request(ask())
    while not whole.complete:
        assert client.receive(whole, 5) is Record.CHUNK
    assert bytes(into) == DATA
    into, rest = assembly()
    for index in range(4):
        assert rest.add(*ChunkedPayload([memoryview(DATA)], len(DATA), CHUNK).chunk(index))
    client.request(ask(4))
    while not rest.complete:
        client.receive(rest, 5)
    assert bytes(into) == DATA
    assert server.bytes_sent == len(DATA) + len(DATA) - 4 * CHUNK


def test_who_waits_hears_that_the_source_lives_and_gets_chunks_as_they_come(
    client: DataClient, shop: Shop
) -> None:
    shop.put(NotYet.IDLE)
    into, here = assembly()
    client.request(ask())
    assert client.receive(here, 5) is Record.IDLE
    shop.put(NotYet.FETCHING)
    while (record := client.receive(here, 5)) is Record.IDLE:
        pass
    assert record is Record.HELD
    _, there = assembly()
    source = ChunkedPayload([memoryview(DATA)], len(DATA), CHUNK)
    there.add(*source.chunk(0))
    shop.put(there)
    while (record := client.receive(here, 5)) is Record.HELD:
        pass
    assert record is Record.CHUNK
    assert here.num_ready == 1
    assert client.receive(here, 5) is Record.HELD
    shop.put(None)
    while (record := client.receive(here, 5)) is Record.HELD:
        pass
    assert record is Record.ABSENT
    assert bytes(into[:CHUNK]) == DATA[:CHUNK]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        REQUEST.pack(b"HWD9", 0, 1, 0, 1) + b"p",
        REQUEST.pack(MAGIC, 0, 1, 0, 60_000),
        REQUEST.pack(MAGIC, 0, 1, 0, 2) + b"\xff\xff",
        REQUEST.pack(MAGIC, 0, 1, 1 << 62, 1) + b"p",
        REQUEST.pack(MAGIC, -1, -1, 10, 1) + b"p",
        REQUEST.pack(MAGIC, 0, 1, 0, 1)[:-3],
    ],
)
def test_rubbish_ends_its_own_connection_and_is_counted(
    data: bytes, server: DataServer, client: DataClient, until: Callable[..., None]
) -> None:
    with socket.create_connection(("127.0.0.1", split_port(server.endpoint))) as evil:
        evil.settimeout(5)
        evil.sendall(data)
        with contextlib.suppress(OSError):  # it may have been ended already
            evil.shutdown(socket.SHUT_WR)
            assert evil.recv(100) == b""
    until(lambda: server.rejected)
    assert sum(server.rejected.values()) == 1
    _, whole = assembly()
    client.request(ask())
    assert client.receive(whole, 5) is Record.CHUNK


def test_a_client_that_reads_nothing_is_let_go_and_costs_no_memory(
    server: DataServer, shop: Shop, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    big = bytes(8 << 20)
    shop.put(ChunkedPayload([memoryview(big)], len(big), 1 << 20))
    before = psutil.Process().memory_info().rss
    with socket.create_connection(("127.0.0.1", split_port(server.endpoint))) as evil:
        evil.sendall(REQUEST.pack(MAGIC, 0, 1, 0, 1) + b"p")
        until(lambda: server._connections)
        until(lambda: not server._connections, "still held after stall_s")
    assert server.bytes_sent < len(big)
    assert psutil.Process().memory_info().rss - before < 30 << 20


def test_connections_beyond_the_most_are_closed_and_the_rest_go_on(
    server: DataServer, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    monkeypatch.setattr(tcp_data, "MAX_CONNECTIONS", 5)
    port = split_port(server.endpoint)
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
    until(lambda: server.rejected["connections"] >= 7)
    assert server.rejected["connections"] == 7
    for each in idle:
        each.close()
    until(lambda: not server._connections)
    client = DataClient(server.endpoint, 5.0)
    _, whole = assembly()
    client.request(ask())
    assert client.receive(whole, 5) is Record.CHUNK
    client.close()


RECORD = struct.Struct("<BQQQ")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (RECORD.pack(9, 0, 0, 0), "record"),
        (RECORD.pack(0, 1, 0, CHUNK), "record"),
        (RECORD.pack(0, 0, 0, 1 << 62), "record"),
        (RECORD.pack(0, 0, 12345, CHUNK) + bytes(CHUNK), "digest"),
    ],
)
def test_a_server_that_lies_is_found_out_before_anything_counts(record: bytes, reason: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = DataClient(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 5.0)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(record)
            _, whole = assembly()
            with pytest.raises(WireError, match=reason):
                client.receive(whole, 5)
            assert whole.num_ready == 0
        client.close()


def test_silence_and_a_cut_end_a_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = DataClient(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 5.0)
        connection, _ = listener.accept()
        _, whole = assembly()
        with pytest.raises(TimeoutError):
            client.receive(whole, 0.1)
        connection.sendall(RECORD.pack(0, 0, 0, CHUNK) + bytes(10))
        connection.close()
        with pytest.raises(ConnectionResetError, match="has closed the connection"):
            client.receive(whole, 5)
        assert whole.num_ready == 0
        client.close()


def test_a_taken_port_is_said(server: DataServer, shop: Shop) -> None:
    with pytest.raises(StreamError, match=r"cannot listen for weights on 127\.0\.0\.1:"):
        DataServer("127.0.0.1", split_port(server.endpoint), shop.find, shop.changed, alive_s=1, stall_s=1)


@pytest.mark.parametrize("plain", ["plain"], indirect=True)
def test_random_bytes_at_every_port_of_a_tree_leave_pushes_alone(
    sender: Start, receiver: Start, publication: Callable[..., Publication], read: Start
) -> None:
    learner = sender(fan_out=1)
    ends = [receiver(learner.address, name) for name in ("relay", "child")]
    address = TcpAddress.parse(learner.address)
    dice = random.Random(11)
    for endpoint in (address.endpoint, address.data, ends[0]._hello.endpoint):
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", split_port(endpoint))) as evil:
                evil.sendall(dice.randbytes(dice.randrange(1, 3000)))
    readers = [read(end, 2) for end in ends]
    for step in (1, 2):
        learner.publish(publication(step, 300_000), 10)
        learner.settle(20, num_receivers=2)
    for reader in readers:
        reader.join()
        assert reader.failures == []


@pytest.mark.parametrize("plain", ["plain"], indirect=True)
def test_a_fixed_port_has_its_data_on_the_next_one(sender: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = TcpAddress.parse(sender(endpoint=f"tcp://127.0.0.1:{port}").address)
    assert (split_port(address.endpoint), split_port(address.data)) == (port, port + 1)
