"""Writing the journal: records are collected, and one commit puts all of them on the disk.

Any thread may append; commits exclude each other and do not hold appends up. Waits for: the disk.

A commit fails in one of two ways. Nothing could be written (JournalFull): the records stay collected, in order,
and the next commit tries again; the caller keeps its acks until one succeeds. Or what is on the disk is not
known (JournalError): after a failed fsync the kernel may have dropped the data and called it clean, so nothing
is tried again and every later call fails; the caller must stop.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from headway.errors import JournalError, JournalFull
from headway.journal.disk import Buffer, Disk
from headway.journal.position import Position
from headway.journal.reader import Reader, TornTail
from headway.journal.records import Entry, RecordKind, pack
from headway.journal.segment import (
    MAX_PAYLOAD,
    RECORD_OVERHEAD,
    SEGMENT_START,
    file_header,
    record_header,
    segment_path,
    segments,
)

SEGMENT_BYTES = 64 << 20
MAX_PENDING_BYTES = 256 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class _Pending:
    """Records of one segment that are not on the disk yet."""

    segment: int
    offset: int
    buffers: list[Buffer]
    num_bytes: int


class Journal:
    """Appends to a journal; `open` makes one. Its folder has one writer at a time.

    Attributes:
        torn: what a crash of the last writer left at the end, cut off now; None if it left nothing.
        committed: everything before this position is on the disk.
        num_commits: fsyncs of record groups so far.
    """

    def __init__(
        self,
        folder: Path,
        lock: int,
        torn: TornTail | None,
        first: int,
        max_bytes: int,
        segment_bytes: int,
        disk: Disk,
    ) -> None:
        self.folder = folder
        self.torn = torn
        self.committed = Position(first, SEGMENT_START)
        self.num_commits = 0
        self._disk = disk
        self._lock_fd = lock
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._end = self.committed
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._fd = -1
        self._fd_segment = 0
        self._broken = ""
        self._appending = threading.Lock()
        self._committing = threading.Lock()

    @classmethod
    def open(
        cls, folder: Path, *, max_bytes: int = 0, segment_bytes: int = SEGMENT_BYTES, disk: Disk | None = None
    ) -> Journal:
        """Continue the journal in a folder, in a new segment, or begin one.

        Args:
            folder: made when missing, mode 0700.
            max_bytes: see `retain`.
            segment_bytes: a segment that has reached so many is followed by a new one.
            disk: for tests.

        Raises:
            JournalError: another process writes it, or its last segment is damaged.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalError(f"another process writes the journal in {folder}") from None
            disk = disk or Disk()
            numbers = segments(folder)
            torn = _cut_tail(folder, numbers[-1], disk) if numbers else None
            first = max(segments(folder), default=0) + 1
            return cls(folder, lock, torn, first, max_bytes, segment_bytes, disk)
        except BaseException:
            os.close(lock)
            raise

    @property
    def end(self) -> Position:
        """Where the next record goes, unless it needs a new segment."""
        return self._end

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not committed."""
        return self._pending_bytes

    @property
    def full(self) -> bool:
        """So much is pending that the caller must commit before it takes in more."""
        return self._pending_bytes >= MAX_PENDING_BYTES

    def log(self, entry: Entry) -> Position:
        """Append a typed entry; as `append`."""
        kind, parts = pack(entry)
        return self.append(kind, *parts)

    def append(self, kind: RecordKind, *parts: Buffer) -> Position:
        """Collect a record for the next commit; touches no disk.

        Args:
            parts: the payload, in pieces that must not change before the commit.

        Raises:
            JournalError: the journal is closed or broken, or the payload exceeds 4 GiB.
        """
        with self._appending:
            self._check()
            return self._append(kind, parts)

    def _append(self, kind: RecordKind, parts: tuple[Buffer, ...]) -> Position:
        length = sum(part.nbytes if isinstance(part, memoryview) else len(part) for part in parts)
        if length > MAX_PAYLOAD:
            raise JournalError(f"a record of {length} bytes; at most {MAX_PAYLOAD} fit")
        at = self._end
        if at.offset >= self._segment_bytes:
            at = Position(at.segment + 1, SEGMENT_START)
        committed = self.committed.offset if self.committed.segment == at.segment else SEGMENT_START
        header = record_header(kind, parts, committed, at.segment, at.offset)
        if not self._pending or self._pending[-1].segment != at.segment:
            self._pending.append(_Pending(at.segment, at.offset, [], 0))
        group = self._pending[-1]
        group.buffers.append(header)
        group.buffers.extend(parts)
        group.num_bytes += RECORD_OVERHEAD + length
        self._pending_bytes += RECORD_OVERHEAD + length
        self._end = Position(at.segment, at.offset + RECORD_OVERHEAD + length)
        return at

    def commit(self) -> Position:
        """Put everything appended so far on the disk; returns `committed`. Without anything new, does nothing.

        Raises:
            JournalFull: no space; call again once there is some. Nothing is lost meanwhile.
            JournalError: the disk failed; the journal is broken.
        """
        with self._committing:
            while True:
                with self._appending:
                    self._check()
                    if not self._pending:
                        return self.committed
                    group = self._pending.pop(0)
                try:
                    self._write(group)
                except BaseException as error:
                    self._restore(group)
                    raise self._failure(error) from error
                with self._appending:
                    self.committed = Position(group.segment, group.offset + group.num_bytes)
                    self._pending_bytes -= group.num_bytes
                self.num_commits += 1

    def _write(self, group: _Pending) -> None:
        if self._fd_segment != group.segment:
            self._close_segment()
            self._fd = self._disk.create(segment_path(self.folder, group.segment))
            self._fd_segment = group.segment
        try:
            if group.offset == SEGMENT_START:
                self._disk.write(self._fd, [file_header(group.segment), *group.buffers], 0)
            else:
                self._disk.write(self._fd, group.buffers, group.offset)
        except OSError as error:
            if error.errno in _FULL:
                # A short write may have reached the file: what stays there must be whole records.
                self._disk.truncate(self._fd, 0 if group.offset == SEGMENT_START else group.offset)
            raise
        try:
            self._disk.sync(self._fd)
        except OSError as error:
            self._broken = f"fsync of segment {group.segment} failed: {error}"
            raise

    def _restore(self, group: _Pending) -> None:
        """Put a group that was not written back, before whatever was appended meanwhile."""
        with self._appending:
            if self._pending and self._pending[0].segment == group.segment:
                later = self._pending.pop(0)
                group.buffers.extend(later.buffers)
                group.num_bytes += later.num_bytes
            self._pending.insert(0, group)

    def _failure(self, error: BaseException) -> BaseException:
        if not isinstance(error, OSError):
            return error
        if error.errno in _FULL and not self._broken:
            return JournalFull(
                f"no space for the journal in {self.folder}: {error.strerror}; nothing is acknowledged until there is"
            )
        self._broken = self._broken or f"writing segment {self._fd_segment} failed: {error}"
        return JournalError(f"the journal in {self.folder} cannot be written: {self._broken}")

    def retain(self, needed: Position) -> list[int]:
        """Delete the oldest segments until the journal is within `max_bytes`.

        Args:
            needed: of the newest checkpoint; its segment and everything after it stay, whatever the size.

        Returns:
            The numbers of the deleted segments.
        """
        numbers = [number for number in segments(self.folder) if number <= self.committed.segment]
        sizes = {number: segment_path(self.folder, number).stat().st_size for number in numbers}
        total = sum(sizes.values())
        deleted: list[int] = []
        for number in numbers:
            if total <= self._max_bytes or number >= min(needed.segment, self.committed.segment):
                break
            self._disk.remove(segment_path(self.folder, number))
            total -= sizes[number]
            deleted.append(number)
        if deleted:
            self._disk.sync_folder(self.folder)
        return deleted

    def close(self) -> None:
        """Commit what is pending and a seal, by which later damage to the last records is told from a crash.

        Raises:
            JournalError: as `commit`; the files are closed all the same. Idempotent.
        """
        if self._lock_fd < 0:
            return
        try:
            if not self._broken and (self._pending or self._fd_segment):
                self.commit()
                self.append(RecordKind.SEALED)
                self.commit()
        finally:
            self._broken = self._broken or "it is closed"
            self._close_segment()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _close_segment(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd, self._fd_segment = -1, 0

    def _check(self) -> None:
        if self._broken:
            raise JournalError(f"the journal in {self.folder} cannot be used: {self._broken}")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(JournalError):  # the first error is the one to hear of
            self.close()


def _cut_tail(folder: Path, number: int, disk: Disk) -> TornTail | None:
    """Cut what a crash left at the end of the last segment off, so that it is whole when it is no longer last."""
    reader = Reader(folder, Position(number, SEGMENT_START))
    for _ in reader:
        pass
    if reader.torn is None:
        return None
    path = segment_path(folder, number)
    if reader.torn.position.offset < SEGMENT_START:
        disk.remove(path)
        disk.sync_folder(folder)
        return reader.torn
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        disk.truncate(fd, reader.torn.position.offset)
        disk.sync(fd)
    finally:
        os.close(fd)
    return reader.torn
