"""Requests to a live run: answered, refused with a reason, and never waited for without end."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from headway.errors import DeadlineExceeded, StreamError
from headway.stream import RequestServer, ipc_directory, ipc_endpoint, request
from headway.wire.codec import encode
from headway.wire.messages import Command, Event

SET = Command(command_id=7, action="set", key="learner.lr", value="0.1")


@pytest.fixture
def run_id(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    base = Path("/tmp") / f"hw-{uuid.uuid4().hex[:8]}"
    base.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    yield "r1"
    for path in sorted(base.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    base.rmdir()


def serve(run_id: str, answers: list[str], ready: threading.Event) -> None:
    server = RequestServer(run_id)
    ready.set()
    deadline = time.monotonic() + 20
    while answers and time.monotonic() < deadline:
        for who, command in server.poll():
            server.answer(who, command.command_id, answers.pop(0))
        time.sleep(0.001)
    server.close()


def test_an_answer_comes_back(run_id: str) -> None:
    ready = threading.Event()
    thread = threading.Thread(target=serve, args=(run_id, ["", "no such key"], ready))
    thread.start()
    assert ready.wait(20)
    assert request(run_id, SET, 20.0) == ""
    assert request(run_id, SET, 20.0) == "no such key"
    thread.join(20)
    assert not thread.is_alive()


def test_a_run_that_is_not_alive_is_said_and_leaves_nothing_behind(run_id: str) -> None:
    with pytest.raises(StreamError, match="no run r1 of processes is alive"):
        request(run_id, SET, 20.0)
    assert not list(ipc_directory(run_id).parent.glob("*r1/*"))


def test_a_run_that_does_not_answer_is_not_waited_for(run_id: str) -> None:
    server = RequestServer(run_id)
    with pytest.raises(DeadlineExceeded, match=r"did not answer `set learner\.lr` in 0\.2 s"):
        request(run_id, SET, 0.2)
    server.close()


def test_garbage_is_counted_and_the_next_request_is_served(run_id: str) -> None:
    server = RequestServer(run_id)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(ipc_endpoint(ipc_directory(run_id), "set"))
        socket.send_multipart([b"\xc1garbage"])
        socket.send_multipart(encode(Event(note="I am no request")))
        socket.send_multipart(encode(SET))
        deadline, served = time.monotonic() + 20, []
        while not served and time.monotonic() < deadline:
            served = server.poll()
        assert [command for _, command in served] == [SET]
    assert sum(server.rejected.values()) == 2
    server.close()
