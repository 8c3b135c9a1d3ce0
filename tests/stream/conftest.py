"""Peers in processes of their own, and waiting with a deadline."""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("peer.py")
DEADLINE_S = 20.0


class Peer:
    """A running peer.py; `line` waits for its next line."""

    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE, env=environment
        )
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        deadline = time.monotonic() + DEADLINE_S
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(descriptor, 65536) if ready else b""
            assert data, f"{self.process.args} said nothing (return code {self.process.poll()})"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(*arguments: object) -> Peer:
        peers.append(Peer(*map(str, arguments)))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()
        assert peer.process.stdout is not None
        peer.process.stdout.close()


@pytest.fixture
def until() -> Callable[..., None]:
    """Run `step` until `done` says so, or fail at the deadline."""

    def wait(done: Callable[[], object], step: Callable[[], object], what: str = "") -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what or done}"
            step()

    return wait


@pytest.fixture(scope="session")
def peer() -> ModuleType:
    """peer.py as a module: its builders of messages."""
    spec = importlib.util.spec_from_file_location("stream_peer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private directory whose path leaves room for a socket's name."""
    path = Path(tempfile.mkdtemp(prefix="hw-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
