"""Bytes from one process into memory of another: headway's channels beside what else could carry them.

Each contestant moves the same payload, as a whole state, from the learner's buffer into a destination whose pages
are there; the clock runs from the moment it is handed over to the moment the last byte is in place (and verified,
where the contestant verifies).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.errors import RunFailed
from headway.types import PolicyVersion
from headway.weights import ChannelSender, Payload, PayloadHeader, PayloadKind, Publication
from headway_bench.push_process import MemberProcess

CHANNELS = ("tcp", "store", "collective")
BASELINES = (
    "memcpy",
    "raw tcp",
    "raw tcp, small buffers",
    "gloo broadcast",
    "gloo in pieces",
    "safetensors",
    "torch.save",
)
GLOO_PIECE_BYTES = 16 << 20
RAW_BUFFER_BYTES = 256 << 10
DEADLINE_S = 300.0


@dataclass
class Source:
    """The learner's bytes: `fill` changes all of them, so that no contestant can win by doing nothing."""

    memory: np.ndarray[Any, np.dtype[np.uint8]]
    step: int = 0

    def fill(self) -> int:
        """Make the next version's bytes; the value that each byte now has."""
        self.step += 1
        self.memory.fill(self.step % 251)
        return self.step % 251


def open_sender(channel: str, digest: str, folder: Path) -> ChannelSender:
    """A channel's sender with its default settings."""
    if channel == "tcp":
        from headway.weights.tcp import TcpSender

        return TcpSender("bench", digest)
    if channel == "store":
        from headway.weights.blobs import DirectoryBlobs
        from headway.weights.store import StoreSender

        return StoreSender(DirectoryBlobs(folder / "store"), "bench", digest)
    from headway.weights.collective import CollectiveSender

    return CollectiveSender("bench", digest)


def whole_publication(source: Source) -> Publication:
    """The source's bytes as they are, as a version of their own."""
    version, state = PolicyVersion(0, source.step), f"s{source.step}"
    header = PayloadHeader(version, PayloadKind.WHOLE, "", state, source.memory.nbytes, state)
    payload = Payload(header, (memoryview(source.memory),))
    return Publication(version, state, (), header, lambda: payload, True)


class WireContestant:
    """One way of moving the source.

    Args:
        name: of CHANNELS or BASELINES; source: what is moved; folder: for files, on the medium that is measured.
    """

    def __init__(self, name: str, source: Source, folder: Path) -> None:
        self.name = name
        self._source = source
        self._stack = contextlib.ExitStack()
        self._member: MemberProcess | None = None
        self._command: dict[str, Any] = {}
        try:
            self._send = self._open(name, folder)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, name: str, folder: Path) -> Callable[[], None]:
        size = self._source.memory.nbytes
        if name == "memcpy":
            into = np.empty(size, np.uint8)
            into.fill(1)
            return lambda: into.__setitem__(slice(None), self._source.memory)
        if name in CHANNELS:
            sender = open_sender(name, "bench", folder)
            self._stack.callback(sender.close)
            self._start("channel", channel=name, address=sender.address, num_bytes=size)
            return lambda: sender.publish(whole_publication(self._source), DEADLINE_S)
        if name.startswith("raw tcp"):
            return self._open_raw(RAW_BUFFER_BYTES if name.endswith("small buffers") else 0)
        if name.startswith("gloo"):
            return self._open_gloo(GLOO_PIECE_BYTES if name.endswith("pieces") else size)
        return self._open_files(name, folder)

    def _start(self, role: str, **arguments: Any) -> None:
        self._member = MemberProcess(role, **arguments)
        self._stack.callback(self._member.close)

    def _open_raw(self, buffer_bytes: int) -> Callable[[], None]:
        """Plain TCP, with the kernel's own buffers or with ones that fit in the cache, which are faster here."""
        listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(DEADLINE_S)
        if buffer_bytes:  # inherited by what it accepts
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        size, port = self._source.memory.nbytes, listener.getsockname()[1]
        self._start("raw", port=port, num_bytes=size, buffer_bytes=buffer_bytes)
        connection, _ = listener.accept()
        connection.settimeout(None)
        self._stack.enter_context(connection)
        return lambda: connection.sendall(memoryview(self._source.memory))

    def _open_gloo(self, piece_bytes: int) -> Callable[[], None]:
        """As one tensor, which is the plain use, or in the pieces that suit it best."""
        from headway.weights.collective_group import BroadcastGroup, Rendezvous

        rendezvous = Rendezvous("127.0.0.1", 0, timeout_s=DEADLINE_S)
        size = self._source.memory.nbytes
        self._start("gloo", port=rendezvous.port, piece_bytes=piece_bytes, num_bytes=size)
        group = BroadcastGroup(rendezvous, "bench", 0, 2, backend="gloo", stall_s=DEADLINE_S)
        self._stack.callback(group.close)
        pieces = torch.from_numpy(self._source.memory).split(piece_bytes)

        def broadcast() -> None:
            for piece in pieces:
                group.broadcast(piece)

        return broadcast

    def _open_files(self, name: str, folder: Path) -> Callable[[], None]:
        from safetensors.torch import save_file

        path = folder / ("push.safetensors" if name == "safetensors" else "push.pt")
        self._start("files", num_bytes=self._source.memory.nbytes)
        self._command = {"path": str(path)}
        tensors = {"w": torch.from_numpy(self._source.memory)}
        return (
            (lambda: save_file(tensors, path))
            if name == "safetensors"
            else (lambda: torch.save(tensors, path))
        )

    def run(self) -> float:
        """Move a new version; seconds.

        Raises:
            RunFailed: what arrived is not what was sent.
        """
        value = self._source.fill()
        probe = self._source.memory.nbytes - 1
        if self._member is None:
            started = time.monotonic()
            self._send()
            return time.monotonic() - started
        if not self._command.get("ready"):
            self._member.answer()
            self._command["ready"] = True
        files = "path" in self._command
        if not files:
            self._begin(probe)
        started = time.monotonic()
        self._send()
        if files:  # it has to be there before it can be read
            self._begin(probe)
        answer = self._member.answer(DEADLINE_S)
        if answer["byte"] != value:
            raise RunFailed(f"{self.name}: the last byte is {answer['byte']}, sent was {value}")
        return answer["done_at"] - started

    def _begin(self, probe: int) -> None:
        assert self._member is not None
        self._member.send(**self._command, probe=probe)
        self._member.answer()

    def close(self) -> None:
        """End its process and its channel."""
        self._stack.close()


@contextlib.contextmanager
def shm_folder() -> Iterator[Path]:
    """A folder in /dev/shm, or the temporary folder where a system has none."""
    base = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix="headway-bench-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
