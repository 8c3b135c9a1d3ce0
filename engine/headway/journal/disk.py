"""The file operations of the journal. Tests put a disk in its place that fills up, lies, or loses power."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

Buffer = bytes | memoryview
_MAX_VECTORS = 512  # POSIX promises 16, Linux and macOS take 1024


class Disk:
    """The real one. Every method may raise OSError."""

    def create(self, path: Path) -> int:
        """A new file for writing at given offsets; its name is durable on return.

        Raises:
            FileExistsError: there is one already.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self.sync_folder(path.parent)
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
        return fd

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """All of the buffers, one after the other, from `offset`."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        at = 0
        while at < len(views):
            written = os.pwritev(fd, views[at : at + _MAX_VECTORS], offset)
            offset += written
            while written:
                if written < len(views[at]):
                    views[at] = views[at][written:]
                    break
                written -= len(views[at])
                at += 1

    def sync(self, fd: int) -> None:
        """What was written survives a power failure once this returns."""
        if sys.platform == "darwin":
            import fcntl

            # fsync there leaves the data in the drive's cache.
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file to `size` bytes."""
        os.ftruncate(fd, size)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()

    def sync_folder(self, path: Path) -> None:
        """Names created in or removed from the folder survive a power failure once this returns."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        """Close a file that `create` opened."""
        os.close(fd)
