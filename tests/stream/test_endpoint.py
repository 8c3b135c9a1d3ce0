"""Sockets bind where only this machine reaches them, publish where they really are, and steal nothing."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from headway.errors import StreamError
from headway.stream import Endpoints, LearnerSocket, ipc_directory, ipc_endpoint
from headway.stream.endpoint import MAX_IPC_PATH, bind


@pytest.fixture
def socket() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    yield context.socket(zmq.ROUTER)
    context.destroy(linger=0)


def test_port_zero_publishes_the_real_endpoint(socket: zmq.Socket[bytes]) -> None:
    endpoint = bind(socket, "tcp://127.0.0.1:0")
    assert endpoint.startswith("tcp://127.0.0.1:")
    assert int(endpoint.rpartition(":")[2]) > 1023


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:0",
        "tcp://*:0",
        "tcp://eth0:5555",
        "tcp://192.168.1.1:0",
        "tcp://[::]:0",
        "tcp://example.com:80",
        "tcp://127.0.0.1.evil.org:1",
        "inproc://x",
        "pgm://127.0.0.1:5",
        "tcp://127.0.0.1",
        "ipc://relative",
        "ipc://@abstract",
        "",
    ],
)
def test_addresses_beyond_this_machine_are_refused(socket: zmq.Socket[bytes], endpoint: str) -> None:
    with pytest.raises(StreamError):
        bind(socket, endpoint)


def test_the_learner_refuses_an_open_address_unless_told() -> None:
    with pytest.raises(StreamError, match="insecure"):
        LearnerSocket(data="tcp://0.0.0.0:0")
    with LearnerSocket(data="tcp://0.0.0.0:0", insecure=True) as stream:
        assert stream.endpoints.data.startswith("tcp://0.0.0.0:")


def test_ipc_directories_are_private(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    path = ipc_directory("abc")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert ipc_directory("abc") == path
    assert ipc_directory("abd") != path
    path.chmod(0o755)
    with pytest.raises(StreamError, match="0755"):
        ipc_directory("abc")


def test_a_socket_in_a_directory_that_others_enter_is_refused(
    socket: zmq.Socket[bytes], short_dir: Path
) -> None:
    short_dir.chmod(0o777)
    with pytest.raises(StreamError, match="0700"):
        bind(socket, f"ipc://{short_dir}/s")


def test_paths_are_measured_before_libzmq_cuts_them(socket: zmq.Socket[bytes], short_dir: Path) -> None:
    room = MAX_IPC_PATH - len(os.fsencode(short_dir)) - 1
    assert bind(socket, ipc_endpoint(short_dir, "s" * room)).endswith("s" * room)
    with pytest.raises(StreamError, match=f"{MAX_IPC_PATH + 1} bytes"):
        ipc_endpoint(short_dir, "s" * (room + 1))


def test_a_socket_file_left_by_sigkill_is_replaced(
    start_peer: Callable[..., object], short_dir: Path
) -> None:
    data, heartbeat = f"ipc://{short_dir}/d", f"ipc://{short_dir}/h"
    owner = start_peer("learner", data, heartbeat)
    owner.line()
    with pytest.raises(StreamError, match="a live process listens there"):
        LearnerSocket(data, heartbeat)
    os.kill(owner.pid, signal.SIGSTOP)
    with pytest.raises(StreamError, match="a live process listens there"):
        LearnerSocket(data, heartbeat)
    owner.kill()
    assert (short_dir / "d").exists()
    with LearnerSocket(data, heartbeat) as stream:
        assert stream.endpoints == Endpoints(data, heartbeat)


def test_a_file_that_is_no_socket_is_left_alone(socket: zmq.Socket[bytes], short_dir: Path) -> None:
    (short_dir / "d").write_text("precious")
    with pytest.raises(StreamError, match="not a socket"):
        bind(socket, f"ipc://{short_dir}/d")
    assert (short_dir / "d").read_text() == "precious"


def test_a_taken_port_is_an_error_and_free_again_after_sigkill(start_peer: Callable[..., object]) -> None:
    owner = start_peer("learner", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    endpoints = Endpoints.parse(owner.line())
    with pytest.raises(StreamError, match="cannot bind"):
        LearnerSocket(endpoints.data)
    owner.kill()
    with LearnerSocket(endpoints.data) as stream:
        assert stream.endpoints.data == endpoints.data


def test_endpoints_as_text() -> None:
    endpoints = Endpoints("tcp://127.0.0.1:5", "ipc:///tmp/x")
    assert Endpoints.parse(str(endpoints)) == endpoints
    assert Endpoints.parse("tcp://h:5") == Endpoints("tcp://h:5", "tcp://h:6")
    for text in ("", "tcp://127.0.0.1:*", "ipc:///tmp/x", "a,b", "tcp://a:1,tcp://b:2,tcp://c:3"):
        with pytest.raises(StreamError, match="DATA,HEARTBEAT"):
            Endpoints.parse(text)
