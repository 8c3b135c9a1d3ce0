"""The head of a shm segment: which buffer is newest, what each holds, and who reads which.

One page of 64-bit words, each written and read whole. Words of a buffer are guarded by its sequence number (odd
while it is written); the table of readers says which buffers must not be overwritten. Nobody ever takes a lock to
publish or to read: the writer marks a buffer as being written and then looks for readers, a reader marks a buffer
as read and then looks whether it is being written, so at least one of the two sees the other and steps back. Only
joining takes one (to be given a row of the table), and the kernel drops that with its owner.

Called by headway.weights.shm.
"""

from __future__ import annotations

import fcntl
import os
import threading
from dataclasses import dataclass

import numpy as np
import psutil
from numpy.typing import NDArray

from headway.errors import WeightError
from headway.types import PolicyVersion
from headway.weights.segment import SharedSegment

HEADER_BYTES = 4096
MAGIC = int.from_bytes(b"HWSHM002", "little")
MAX_READERS = 64
MAX_BUFFERS = 8
_MAGIC_AT, _MANIFEST_AT, _COUNT_AT, _NEWEST_AT = 0, 1, 2, 8
_SLOTS_AT, _SLOT_WORDS = 16, 12  # sequence, epoch, step, state, base, delta bytes, delta digest
_READERS_AT, _READER_WORDS = 128, 4  # pid, start time, pinned buffers, buffers that the writer wants back
NO_BUFFER = 2**64 - 1

assert _SLOTS_AT + MAX_BUFFERS * _SLOT_WORDS <= _READERS_AT
assert 8 * (_READERS_AT + MAX_READERS * _READER_WORDS) <= HEADER_BYTES


@dataclass(frozen=True)
class Slot:
    """What one buffer holds.

    Attributes:
        sequence: even: it is whole; changes with every write.
        state_digest, base_digest, delta_digest: 16 hex digits; base_digest "" and delta_bytes 0: no delta.
    """

    sequence: int
    version: PolicyVersion
    state_digest: str
    base_digest: str
    delta_bytes: int
    delta_digest: str


class ControlBlock:
    """The words of a segment's first page.

    Args:
        segment: mapped; its first HEADER_BYTES are this block.
    """

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment
        self._words: NDArray[np.uint64] = np.frombuffer(segment.memory, np.uint64, HEADER_BYTES // 8)
        self._fence_lock = threading.Lock()

    def format(self, manifest_digest: str, num_buffers: int) -> None:
        """Write everything that never changes; magic last, so that nobody attaches to less."""
        self._words[:] = 0
        self._words[_NEWEST_AT] = NO_BUFFER
        self._words[_COUNT_AT] = num_buffers
        self._words[_MANIFEST_AT] = int(manifest_digest, 16)
        self._fence()
        self._words[_MAGIC_AT] = MAGIC

    def check(self, manifest_digest: str) -> int:
        """Buffers of the segment.

        Raises:
            WeightError: it is of another format or of another model.
        """
        found = _hex(int(self._words[_MANIFEST_AT]))
        if int(self._words[_MAGIC_AT]) != MAGIC or found != manifest_digest:
            raise WeightError(
                f"shared weights {self._segment.path.name}: manifest {found} is not this model's {manifest_digest}; "
                "learner and generator must load the same model folder with the same versions"
            )
        return int(self._words[_COUNT_AT])

    @property
    def newest(self) -> int | None:
        """Index of the newest buffer."""
        index = int(self._words[_NEWEST_AT])
        return None if index == NO_BUFFER else index

    def publish(self, index: int) -> None:
        """This buffer is the newest."""
        self._fence()
        self._words[_NEWEST_AT] = index

    # Buffers --------------------------------------------------------------------------------------------------

    def sequence(self, index: int) -> int:
        """Of a buffer; odd while it is written."""
        return int(self._words[self._slot(index)])

    def begin(self, index: int) -> bool:
        """Mark a buffer as being written; False, with nothing changed, if somebody reads it."""
        at = self._slot(index)
        self._words[at] |= np.uint64(1)
        self._fence()
        if self.readers_of(index):
            self._words[at] &= ~np.uint64(1)
            return False
        return True

    def finish(self, index: int, slot: Slot) -> None:
        """Say what a buffer that was begun now holds; its sequence number is the next even one."""
        at = self._slot(index)
        values = [slot.version.epoch, slot.version.step, int(slot.state_digest, 16)]
        values += [int(slot.base_digest or "0", 16), slot.delta_bytes, int(slot.delta_digest or "0", 16)]
        self._words[at + 1 : at + 7] = np.array(values, np.uint64)
        self._fence()
        self._words[at] += np.uint64(1)

    def read(self, index: int) -> Slot | None:
        """What a buffer holds, None while it is written or was never."""
        at = self._slot(index)
        before = int(self._words[at])
        epoch, step, state, base, delta_bytes, delta = (int(word) for word in self._words[at + 1 : at + 7])
        self._fence()
        if before % 2 or before == 0 or int(self._words[at]) != before:
            return None
        version = PolicyVersion(epoch, step)
        return Slot(before, version, _hex(state), _hex(base) if delta_bytes else "", delta_bytes, _hex(delta))

    # Readers --------------------------------------------------------------------------------------------------

    def join(self) -> int:
        """Take a row of the table of readers; rows of the dead are free.

        Raises:
            WeightError: MAX_READERS readers are alive.
        """
        with open(self._segment.path, "rb+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            for row in range(MAX_READERS):
                at = self._reader(row)
                if not _alive(int(self._words[at]), int(self._words[at + 1])):
                    self._words[at + 2 : at + 4] = 0
                    self._words[at + 1] = _start_time(os.getpid())
                    self._words[at] = os.getpid()
                    return row
        raise WeightError(
            f"shared weights {self._segment.path.name}: {MAX_READERS} generators read them already"
        )

    def leave(self, row: int) -> None:
        """Give the row back, with everything pinned."""
        at = self._reader(row)
        self._words[at + 2] = 0
        self._words[at] = 0

    def pin(self, row: int, index: int, sequence: int) -> bool:
        """Keep a buffer from being overwritten; False if it was overwritten meanwhile, or is about to be."""
        at = self._reader(row)
        self._words[at + 2] |= np.uint64(1 << index)
        self._fence()
        if self.sequence(index) != sequence:
            self.unpin(row, index)
            return False
        return True

    def unpin(self, row: int, index: int) -> None:
        """Let the writer have a buffer."""
        at = self._reader(row)
        self._fence()
        self._words[at + 2] &= ~np.uint64(1 << index)
        self._words[at + 3] &= ~np.uint64(1 << index)

    def wanted(self, row: int) -> int:
        """Bits of the buffers that the writer asks this reader to let go."""
        at = self._reader(row)
        return int(self._words[at + 3] & self._words[at + 2])

    def want(self, index: int) -> None:
        """Ask whoever reads a buffer to let it go."""
        for row in self._rows_of(index):
            self._words[self._reader(row) + 3] |= np.uint64(1 << index)

    def readers_of(self, index: int) -> list[int]:
        """Pids of the live readers that pin a buffer."""
        return [int(self._words[self._reader(row)]) for row in self._rows_of(index)]

    def _rows_of(self, index: int) -> list[int]:
        table = self._words[_READERS_AT : _READERS_AT + MAX_READERS * _READER_WORDS].reshape(MAX_READERS, -1)
        pinned = np.flatnonzero(table[:, 2] & np.uint64(1 << index))
        return [int(row) for row in pinned if _alive(int(table[row, 0]), int(table[row, 1]))]

    def close(self) -> None:
        """Let go of the mapping."""
        self._words = np.zeros(HEADER_BYTES // 8, np.uint64)

    @staticmethod
    def _slot(index: int) -> int:
        return _SLOTS_AT + index * _SLOT_WORDS

    @staticmethod
    def _reader(row: int) -> int:
        return _READERS_AT + row * _READER_WORDS

    def _fence(self) -> None:
        """Order the words before it against those after it: taking a lock is a full barrier for the processor."""
        with self._fence_lock:
            pass


def _hex(word: int) -> str:
    return f"{word:016x}"


def _start_time(pid: int) -> int:
    return int(psutil.Process(pid).create_time() * 100)


def _alive(pid: int, start_time: int) -> bool:
    """Whether this very process lives: a pid may be another's by now, a zombie holds nothing."""
    if pid == 0:
        return False
    try:
        process = psutil.Process(pid)
        return int(process.create_time() * 100) == start_time and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
