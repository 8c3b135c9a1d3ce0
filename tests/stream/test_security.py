"""Keys: who gets in, who does not, and what is counted."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from headway.errors import StreamError
from headway.stream.endpoint import bind
from headway.stream.keys import new_keys, read_allowed, read_client_keys, read_server_keys
from headway.stream.security import ClientSecurity, Guard, ServerSecurity
from headway.stream.transport import open_socket
from headway.wire.codec import DEFAULT_LIMITS

DEADLINE_S = 10.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    new_keys(tmp_path / "keys", ["generator", "other"])
    return tmp_path / "keys"


@contextmanager
def server(folder: Path, *, guarded: bool = True) -> Iterator[tuple[zmq.Socket[bytes], str, Guard | None]]:
    security = ServerSecurity(folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = security.guard(context) if guarded else None
    socket = open_socket(context, zmq.ROUTER, send_mark=10, limits=DEFAULT_LIMITS)
    security.protect(socket)
    try:
        yield socket, bind(socket, "tcp://0.0.0.0:0").replace("0.0.0.0", "127.0.0.1"), guard
    finally:
        if guard is not None:
            guard.close()
        context.destroy(linger=0)


@contextmanager
def client(endpoint: str, protect: Callable[[zmq.Socket[bytes]], None]) -> Iterator[zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = open_socket(context, zmq.DEALER, send_mark=10, limits=DEFAULT_LIMITS)
    protect(socket)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


def arrives(socket: zmq.Socket[bytes], seconds: float) -> bool:
    return bool(socket.poll(int(seconds * 1000)))


def failures(monitor: zmq.Socket[bytes]) -> int:
    """The first handshake failure that a socket's monitor reports; waits for it."""
    from zmq.utils.monitor import recv_monitor_message

    assert monitor.poll(int(DEADLINE_S * 1000)), "no handshake failed"
    return recv_monitor_message(monitor)["event"]


def test_a_client_with_a_key_on_the_list_gets_in_and_is_known_by_name(folder: Path) -> None:
    with (
        server(folder) as (socket, endpoint, guard),
        client(endpoint, ClientSecurity(folder / "generator.key").protect) as mine,
    ):
        mine.send(b"hello")
        assert arrives(socket, DEADLINE_S)
        frame = socket.recv_multipart(copy=False)[-1]
        assert frame.bytes == b"hello"
        assert frame.get("User-Id") == "generator"
        assert guard is not None
        assert dict(guard.admitted) == {"generator": 1}
        assert not guard.refused


def test_who_has_no_key_another_servers_key_or_a_key_not_listed_stays_out_and_is_counted(
    folder: Path, tmp_path: Path
) -> None:
    stranger_public, stranger_secret = zmq.curve_keypair()

    def no_keys(socket: zmq.Socket[bytes]) -> None:
        pass

    def unlisted(socket: zmq.Socket[bytes]) -> None:
        socket.curve_serverkey = read_server_keys(folder).public.encode()
        socket.curve_publickey, socket.curve_secretkey = stranger_public, stranger_secret

    new_keys(tmp_path / "elsewhere")
    wrong_server = ClientSecurity(tmp_path / "elsewhere" / "generator.key").protect
    for protect in (no_keys, unlisted, wrong_server):
        with server(folder) as (socket, endpoint, guard), client(endpoint, protect) as mine:
            monitor = socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            )
            mine.send(b"hello", zmq.NOBLOCK)
            assert failures(monitor)
            assert not arrives(socket, 0.05)
            assert guard is not None
            assert not guard.admitted
            assert guard.refused["key"] == (1 if protect is unlisted else 0)


def test_a_client_taken_off_the_list_is_out_at_its_next_connection(folder: Path) -> None:
    security = ClientSecurity(folder / "other.key")
    with server(folder) as (socket, endpoint, guard):
        with client(endpoint, security.protect) as mine:
            mine.send(b"in")
            assert arrives(socket, DEADLINE_S)
            socket.recv_multipart()
        lines = (folder / "allowed").read_text().splitlines()
        (folder / "allowed").write_text(
            "\n".join(line for line in lines if not line.endswith(" other")) + "\n"
        )
        with client(endpoint, security.protect) as mine:
            mine.send(b"out")
            assert guard is not None
            deadline = time.monotonic() + DEADLINE_S
            while not guard.refused and time.monotonic() < deadline:
                assert not arrives(socket, 0.02)
            assert guard.refused["key"] >= 1


def test_without_a_guard_nobody_gets_in(folder: Path) -> None:
    with (
        server(folder, guarded=False) as (socket, endpoint, _),
        client(endpoint, ClientSecurity(folder / "generator.key").protect) as mine,
    ):
        monitor = socket.get_monitor_socket(
            zmq.EVENT_ALL_V41 if hasattr(zmq, "EVENT_ALL_V41") else zmq.EVENT_ALL
        )
        mine.send(b"hello", zmq.NOBLOCK)
        from zmq.utils.monitor import recv_monitor_message

        seen: set[int] = set()
        while not seen & {
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
            zmq.EVENT_DISCONNECTED,
        }:
            assert monitor.poll(int(DEADLINE_S * 1000)), seen
            seen.add(recv_monitor_message(monitor)["event"])
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in seen
        assert not arrives(socket, 0.05)


def test_a_socket_without_keys_may_not_bind_where_others_reach_it(folder: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = open_socket(context, zmq.ROUTER, send_mark=10, limits=DEFAULT_LIMITS)
    with pytest.raises(StreamError, match="headway keys new DIR"):
        bind(socket, "tcp://0.0.0.0:0")
    assert bind(socket, "tcp://0.0.0.0:0", insecure=True).startswith("tcp://0.0.0.0:")
    context.destroy(linger=0)


def test_key_files_are_private_and_say_what_is_wrong_with_them(folder: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("server.key", "generator.key", "allowed"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert sorted(read_allowed(folder).values()) == ["generator", "other"]
    keys = read_client_keys(folder / "generator.key")
    assert keys.server == read_server_keys(folder).public
    assert keys.secret not in repr(keys)
    with pytest.raises(StreamError, match="exists; choose another name"):
        new_keys(folder, ["generator"])
    with pytest.raises(StreamError, match="expected 1 to 64"):
        new_keys(folder, ["../up"])
    assert [path.name for path in new_keys(folder, ["third"])] == ["third.key"]
    assert read_client_keys(folder / "third.key").server == keys.server

    (folder / "generator.key").chmod(0o640)
    with pytest.raises(StreamError, match="has mode 0640"):
        read_client_keys(folder / "generator.key")
    (folder / "generator.key").chmod(0o600)
    (folder / "generator.key").write_text('{"secret": "hush"')
    with pytest.raises(StreamError, match="no key file of headway") as caught:
        read_client_keys(folder / "generator.key")
    assert "hush" not in str(caught.value)
    (folder / "allowed").write_text("short name\n")
    with pytest.raises(StreamError, match="allowed, line 1"):
        read_allowed(folder)
    with pytest.raises(StreamError, match="there is no key file"):
        read_server_keys(tmp_path)
