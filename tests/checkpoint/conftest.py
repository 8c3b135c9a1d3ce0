"""Disks that fill up or lose power, and checkpoints small enough to try every boundary."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headway.checkpoint import CheckpointDisk, CheckpointStore, Marker
from headway.checkpoint.store import Pieces
from headway.types import PolicyVersion


class PowerLoss(BaseException):
    """The process is gone: nothing that catches errors may run on."""


class FaultyDisk(CheckpointDisk):
    """Fails at the operation with this number, before it or (`half`) in its middle.

    Attributes:
        count: operations so far.
    """

    def __init__(self, fail_at: int, error: Callable[[], BaseException], half: bool = False) -> None:
        self.fail_at, self.error, self.half = fail_at, error, half
        self.count = 0
        self.dead = False

    def _next(self) -> bool:
        """Whether the operation is to fail in its middle; raises when it is to fail before."""
        if self.dead:
            raise self.error()
        self.count += 1
        if self.count - 1 != self.fail_at:
            return False
        error = self.error()
        self.dead = isinstance(error, PowerLoss)
        if not self.half:
            raise error
        return True

    def _done(self, half: bool) -> None:
        if half:
            raise self.error()

    def create(self, path: Path) -> int:
        half = self._next()
        fd = super().create(path)
        self._done(half)
        return fd

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        half = self._next()
        if half:
            super().write(
                fd, [memoryview(b).cast("B")[: len(memoryview(b).cast("B")) // 2] for b in buffers], offset
            )
        else:
            super().write(fd, buffers, offset)
        self._done(half)

    def sync(self, fd: int) -> None:
        self._done(self._next())

    def sync_folder(self, path: Path) -> None:
        """Not counted: the power that is lost is this process's."""

    def make_folder(self, path: Path) -> None:
        half = self._next()
        super().make_folder(path)
        self._done(half)

    def rename(self, source: Path, target: Path) -> None:
        half = self._next()
        super().rename(source, target)
        self._done(half)

    def remove(self, path: Path) -> None:
        half = self._next()
        super().remove(path)
        self._done(half)

    def remove_folder(self, path: Path) -> None:
        half = self._next()
        if half:  # some of its files are gone
            for file in sorted(path.iterdir())[:1]:
                file.unlink()
        else:
            super().remove_folder(path)
        self._done(half)


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def marker(step: int, epoch: int = 0, journal: str = "") -> Marker:
    return Marker(0, "run", PolicyVersion(epoch, step), [], journal, 1.0, {})


def pieces(step: int) -> Pieces:
    return {
        "model.safetensors": lambda: [memoryview(b"weights" * 100), memoryview(bytes([step % 251]) * 50)],
        "progress.msgpack": lambda: [memoryview(f"step {step}".encode())],
    }


Write = Callable[..., CheckpointStore]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A store in which checkpoints of these steps were written, one after the other."""

    def write(*steps: int, keep: int = 2) -> CheckpointStore:
        store = CheckpointStore(tmp_path / "checkpoints", keep, FaultyDisk(-1, full))
        for step in steps:
            store.write(marker(step), pieces(step))
        return store

    return write


@pytest.fixture(scope="session")
def faulty() -> Callable[..., FaultyDisk]:
    """Makes a disk that fails at its nth operation: `faulty(n, "full")` or `faulty(n, "power")`."""

    def make(fail_at: int, kind: str, half: bool = False) -> FaultyDisk:
        return FaultyDisk(fail_at, full if kind == "full" else PowerLoss, half)

    return make


@pytest.fixture(scope="session")
def power_loss() -> type[BaseException]:
    return PowerLoss


@pytest.fixture(scope="session")
def make_marker() -> Callable[..., Marker]:
    return marker


@pytest.fixture(scope="session")
def make_pieces() -> Callable[[int], Pieces]:
    return pieces
