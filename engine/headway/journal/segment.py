"""The bytes of a segment file, and finding what is whole in one.

    file     magic "HDWJ", uint16 format, uint16 0, uint64 number, uint64 checksum of these     24 bytes
    record   magic "HDWR", uint8 kind, 3 bytes 0, uint32 length, uint64 committed, uint64 checksum, payload

All little endian. A checksum is xxh3-64 over the fields before it, the segment's number, the record's offset and
the payload, so that a record is valid in its own place only. `committed` is the offset up to which this segment
was known to be on the disk when the record was made: what a crash may have torn lies past the last `committed`
that can be read; an invalid record before it is damage.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from headway.errors import JournalError
from headway.journal.disk import Buffer
from headway.journal.records import RecordKind

FORMAT = 1
_FILE_MAGIC, _RECORD_MAGIC = b"HDWJ", b"HDWR"
_FILE = struct.Struct("<4sHHQ")
_SUM = struct.Struct("<Q")
_RECORD = struct.Struct("<4sB3xIQ")
_PLACE = struct.Struct("<QQ")
SEGMENT_START = _FILE.size + _SUM.size
RECORD_OVERHEAD = _RECORD.size + _SUM.size
MAX_PAYLOAD = (1 << 32) - 1
_NAME = re.compile(r"(\d{10})\.journal")
_KINDS = {int(kind): kind for kind in RecordKind}


class Record(msgspec.Struct, frozen=True):
    """One record: `payload` is what was appended, its parts joined."""

    kind: RecordKind
    payload: bytes


def segment_path(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / f"{number:010d}.journal"


def segments(folder: Path) -> list[int]:
    """The numbers of the segment files in a folder, ascending; empty when there is no folder."""
    names = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in names if match is not None)


def file_header(number: int) -> bytes:
    """The first SEGMENT_START bytes of a segment."""
    head = _FILE.pack(_FILE_MAGIC, FORMAT, 0, number)
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def record_header(
    kind: RecordKind, parts: Sequence[Buffer], committed: int, number: int, offset: int
) -> bytes:
    """The header of a record at `offset` of segment `number`."""
    head = _RECORD.pack(_RECORD_MAGIC, kind, sum(map(_size, parts)), committed)
    return head + _SUM.pack(_checksum(head, parts, number, offset))


def _size(part: Buffer) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _checksum(head: bytes, parts: Sequence[Buffer], number: int, offset: int) -> int:
    digest = xxhash.xxh3_64(head + _PLACE.pack(number, offset))
    for part in parts:
        digest.update(part)
    return digest.intdigest()


class Segment:
    """A segment file being read, from its first record.

    Attributes:
        size: bytes of the file when it was opened.
        whole: the file's own header is valid. It is not when a crash came between the file's creation and the
            first commit.
    """

    def __init__(self, file: BinaryIO, number: int) -> None:
        """
        Raises:
            JournalError: another format, or the file of another segment.
        """
        self._file = file
        self._number = number
        self.size = file.seek(0, 2)
        file.seek(0)
        header = file.read(SEGMENT_START)
        self.whole = header == file_header(number)
        if not self.whole and len(header) == SEGMENT_START:
            magic, version, _, named = _FILE.unpack_from(header)
            if _SUM.unpack_from(header, _FILE.size)[0] == xxhash.xxh3_64_intdigest(header[: _FILE.size]):
                raise JournalError(
                    f"{file.name} is segment {named} of journal format {version} ({magic!r}); expected segment "
                    f"{number} of format {FORMAT}"
                )

    def at(self, offset: int) -> tuple[Record, int, int] | None:
        """The record at `offset`, its `committed` and the offset after it; None when no valid one lies there."""
        self._file.seek(offset)
        header = self._file.read(RECORD_OVERHEAD)
        if len(header) < RECORD_OVERHEAD:
            return None
        magic, kind, length, committed = _RECORD.unpack_from(header)
        if magic != _RECORD_MAGIC or kind not in _KINDS or offset + RECORD_OVERHEAD + length > self.size:
            return None
        payload = self._file.read(length)
        found = _checksum(header[: _RECORD.size], (payload,), self._number, offset)
        if len(payload) < length or found != _SUM.unpack_from(header, _RECORD.size)[0]:
            return None
        return Record(_KINDS[kind], payload), committed, offset + RECORD_OVERHEAD + length

    def committed_beyond(self, offset: int) -> bool:
        """Whether a valid record past `offset` says that what lies at `offset` was on the disk already."""
        for candidate in self._candidates(offset + 1):
            found = self.at(candidate)
            if found is not None and found[1] > offset:
                return True
        return False

    def _candidates(self, offset: int) -> Iterator[int]:
        step = 1 << 20
        overlap = len(_RECORD_MAGIC) - 1
        while offset < self.size:
            self._file.seek(offset)
            chunk = self._file.read(step + overlap)
            at = chunk.find(_RECORD_MAGIC)
            while at >= 0:
                yield offset + at
                at = chunk.find(_RECORD_MAGIC, at + 1)
            offset += step
