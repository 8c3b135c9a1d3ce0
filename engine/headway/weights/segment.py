"""A named piece of shared memory: made by the learner, attached by generators, removed whoever dies.

A file under /dev/shm, mode 0600, mapped by both sides. Its name holds the run id and the owner's pid, so that a
supervisor, or the next run, can remove what a SIGKILL left behind (headway.launch).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path

from headway.errors import WeightError


def shared_directory() -> Path:
    """Where segments live: /dev/shm, or the temporary folder where a system has none."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def segment_name(run_id: str, owner_pid: int) -> str:
    """The file name of a run's weight segment."""
    return f"headway-{run_id}-{owner_pid}"


class SharedSegment:
    """A mapped file. The creator unlinks it on close; every page is touched once when it is made.

    Args:
        name: file name in shared_directory().
        num_bytes: size when creating; None attaches to an existing segment.

    Raises:
        WeightError: it exists already (create), does not exist (attach), or memory is short; says which.
    """

    def __init__(self, name: str, num_bytes: int | None) -> None:
        self.path = shared_directory() / name
        self.owned = num_bytes is not None
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if self.owned else 0)
        try:
            descriptor = os.open(self.path, flags, 0o600)
        except FileExistsError as error:
            raise WeightError(
                f"shared memory {self.path} exists already; remove it if its run is dead"
            ) from error
        except FileNotFoundError as error:
            raise WeightError(f"shared memory {self.path} is gone: its learner has ended") from error
        try:
            if num_bytes is not None:
                self._reserve(descriptor, num_bytes)
            self.num_bytes = os.fstat(descriptor).st_size
            self.memory = mmap.mmap(descriptor, self.num_bytes)
        finally:
            os.close(descriptor)

    def _reserve(self, descriptor: int, num_bytes: int) -> None:
        # posix_fallocate rather than ftruncate: a full /dev/shm must be an error here, not a SIGBUS later.
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            free = os.statvfs(self.path.parent)
            raise WeightError(
                f"shared memory for the weights: {num_bytes / 2**20:.0f} MiB needed in {self.path.parent}, "
                f"{free.f_bavail * free.f_frsize / 2**20:.0f} MiB free ({error.strerror})"
            ) from error

    def close(self) -> None:
        """Unmap where no tensor refers to it any more; the creator also removes the file."""
        if self.owned:
            self.path.unlink(missing_ok=True)
        with contextlib.suppress(BufferError):  # a tensor still views it: the mapping ends with the process
            self.memory.close()
