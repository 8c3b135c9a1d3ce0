"""Disks that fill up and lose power."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headway.journal import Disk

PAGE = 512


class PowerCut(BaseException):
    """The machine stops here."""


class FaultyDisk(Disk):
    """A disk on real files that remembers what fsync has made durable, and fails at the operation it is told to.

    Attributes:
        fail_at: number of the operation, from 0, that fails; `error`: with this errno, or a power cut if None.
        space: bytes that can still be written; None: no limit.
    """

    def __init__(self, fail_at: int = -1, error: int | None = None) -> None:
        self.fail_at = fail_at
        self.error = error
        self.space: int | None = None
        self.num_operations = 0
        self._paths: dict[int, Path] = {}
        self._durable: dict[Path, bytes] = {}

    def _operation(self) -> None:
        self.num_operations += 1
        if self.num_operations - 1 == self.fail_at:
            if self.error is None:
                raise PowerCut
            raise OSError(self.error, "injected")

    def create(self, path: Path) -> int:
        self._operation()
        fd = super().create(path)
        self._paths[fd] = path
        self._durable[path] = b""
        return fd

    def write(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        data = b"".join(bytes(buffer) for buffer in buffers)
        if self.num_operations == self.fail_at:
            super().write(fd, [data[: len(data) // 2]], offset)  # a short write, and then the fault
        self._operation()
        if self.space is not None and len(data) > self.space:
            super().write(fd, [data[: self.space]], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(fd, buffers, offset)
        if self.space is not None:
            self.space -= len(data)

    def sync(self, fd: int) -> None:
        self._operation()
        super().sync(fd)
        if fd in self._paths:
            self._durable[self._paths[fd]] = self._paths[fd].read_bytes()

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)

    def lose_power(self, seed: int) -> None:
        """Leave of each file what was durable and any of the later pages, each whole or as it was before."""
        choice = random.Random(seed)
        for path, durable in self._durable.items():
            if not path.exists():
                continue
            written = path.read_bytes()
            pages = [
                (written if choice.random() < 0.5 else durable.ljust(len(written), b"\0"))[at : at + PAGE]
                for at in range(0, len(written), PAGE)
            ]
            left = b"".join(pages)
            if choice.random() < 0.5:
                left = left[: choice.randint(len(durable), len(left))]
            path.write_bytes(left)


@pytest.fixture
def faulty_disk() -> Callable[..., FaultyDisk]:
    return FaultyDisk


@pytest.fixture
def power_cut() -> type[PowerCut]:
    return PowerCut
