"""The same bombs for every socket that is bound: refused by reason, nothing executed, no memory taken."""

from __future__ import annotations

import os
import pickle
import shutil
import socket as plain
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import psutil
import pytest
import zmq

from headway.stream import LearnerSocket, RequestServer, SupervisorControl, ipc_directory, ipc_endpoint
from headway.wire import encode
from headway.wire.messages import Bye, Stop

HEAD = b"HDWY\x01\0\0\0"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
_METADATA = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY = b"\x04" + bytes([len(_METADATA)]) + _METADATA
FOUR_GIB_FRAME = GREETING + READY + b"\x02" + (1 << 32).to_bytes(8, "big") + b"x"


class Target:
    """A bound socket: where it is, how it is polled, what it has refused, and whom it listens to."""

    def __init__(self, kind: str) -> None:
        self.name = b"attacker"
        if kind in ("data", "heartbeat"):
            learner = LearnerSocket()
            self.endpoint = getattr(learner.endpoints, kind)
            self._owner, self.poll = learner, lambda: learner.poll(0.01)
        elif kind == "control":
            control = SupervisorControl()
            self.name = b"learner"
            self.endpoint = control.endpoint
            self._owner, self.poll = control, lambda: control.poll(0.01)
        else:
            server = RequestServer("bombed")
            self.endpoint = ipc_endpoint(ipc_directory("bombed"), "set")
            self._owner, self.poll = server, server.poll

    @property
    def rejected(self) -> Counter[str]:
        return self._owner.rejected

    def connect(self) -> plain.socket:
        scheme, _, where = self.endpoint.partition("://")
        if scheme == "ipc":
            raw = plain.socket(plain.AF_UNIX)
            raw.settimeout(15.0)
            raw.connect(where)
            return raw
        host, _, port = where.partition(":")
        return plain.create_connection((host, int(port)), timeout=15.0)

    def close(self) -> None:
        self._owner.close()


@pytest.fixture(params=["data", "heartbeat", "control", "request"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    base = tempfile.mkdtemp(prefix="hw-", dir="/tmp")  # a short path: a socket's name has 107 bytes
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    made = Target(request.param)
    yield made
    made.close()
    shutil.rmtree(base, ignore_errors=True)


def test_every_bound_socket_refuses_what_could_run_or_fill_the_process(
    target: Target, until: Callable[..., None], tmp_path: Path
) -> None:
    exploded = tmp_path / "exploded"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(exploded),))

    bombs = [
        [pickle.dumps(Bomb())],
        [HEAD + msgpack.packb(msgpack.ExtType(42, b"x"))],
        [HEAD + b"\x82\xa4kind\xa4Stop\xa6reason\xdb\xff\xff\xff\xff"],  # a text of 4 GiB, none of it there
        [HEAD + b"\x82\xa4kind\xa4Stop\xa1x" + b"\x91" * 10**6],
        [b"HDWY\x09\0\0\0\x80"],  # another version of the protocol
        [b"x"] * 20_000,
        encode(Stop(reason="not yours to say")),
        encode(Bye(incarnation="somebody else", unsent=0)),
    ]
    memory = psutil.Process().memory_info().rss
    with target.connect() as raw:
        raw.sendall(FOUR_GIB_FRAME)
        with zmq.Context() as context, context.socket(zmq.DEALER) as attacker:
            attacker.linger = 0
            attacker.routing_id = target.name
            attacker.connect(target.endpoint)
            for bomb in bombs:
                attacker.send_multipart(bomb)
            served: list[object] = []
            until(lambda: target.rejected.total() == len(bombs), lambda: served.extend(target.poll()))
        try:
            while raw.recv(4096):  # it hung up, or this would wait for the rest of the frame
                pass
        except ConnectionResetError:
            pass
    assert served == []
    assert {"magic", "head", "nesting", "schema", "frames"} <= set(target.rejected)
    assert not exploded.exists()
    assert psutil.Process().memory_info().rss - memory < 64 << 20
