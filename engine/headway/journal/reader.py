"""Reading a journal: after a crash, for a replay, or beside the learner that writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from headway.errors import JournalError
from headway.journal.position import Position
from headway.journal.records import RecordKind
from headway.journal.segment import SEGMENT_START, Record, Segment, segment_path, segments


class TornTail(msgspec.Struct, frozen=True):
    """Bytes at the end of a journal that are no whole record: what was being written at a crash.

    Nothing in them was acknowledged.

    Attributes:
        position: of the first of them; num_bytes: how many.
    """

    position: Position
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.num_bytes} bytes at {self.position} are no whole record: the write was cut off"


class Reader:
    """Iterates over (position, record); seals are left out.

    Attributes:
        torn: the torn tail, known once the iteration has ended; None when the journal ends with a whole record.
        end: the position after the last whole record, so far.
    """

    def __init__(self, folder: Path, start: Position | None = None) -> None:
        """
        Args:
            folder: of the journal.
            start: a position of a record, or the end of the journal; None: the oldest record kept.

        Raises:
            JournalError: there is no journal, or retention has removed the segment of `start`.
        """
        self._folder = folder
        self._numbers = segments(folder)
        self.torn: TornTail | None = None
        if not self._numbers:
            raise JournalError(f"{folder} holds no journal")
        first = Position(self._numbers[0], SEGMENT_START)
        self._start = self.end = start or first
        if self._start < first:
            raise JournalError(
                f"the journal in {folder} starts at segment {first.segment}; segments "
                f"{self._start.segment} to {first.segment - 1} were removed by retention (journal.max_bytes)"
            )
        if self._start.segment > self._numbers[-1]:
            raise JournalError(
                f"the journal in {folder} ends with segment {self._numbers[-1]}; position {self._start} lies beyond"
            )

    def __iter__(self) -> Iterator[tuple[Position, Record]]:
        """
        Raises:
            JournalError: damage in what was committed, a missing segment, or a start that is no record's;
                names the segment's file.
        """
        numbers = [number for number in self._numbers if number >= self._start.segment]
        for expected, number in enumerate(numbers, self._start.segment):
            if number != expected:
                raise JournalError(f"{segment_path(self._folder, expected)} is missing; {number} is there")
            yield from self._segment(number, last=number == numbers[-1])

    def _segment(self, number: int, last: bool) -> Iterator[tuple[Position, Record]]:
        path = segment_path(self._folder, number)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise JournalError(f"{path} was removed by retention while it was read") from None
        with file:
            segment = Segment(file, number)
            at = self._start.offset if number == self._start.segment else SEGMENT_START
            self.end = Position(number, at)
            if not segment.whole:
                self._invalid(path, segment, Position(number, SEGMENT_START), last)
                return
            if at > segment.size:
                raise JournalError(f"{path} ends at byte {segment.size}; position {self.end} lies beyond")
            while at < segment.size:
                found = segment.at(at)
                if found is None:
                    self._invalid(path, segment, Position(number, at), last)
                    return
                record, _, after = found
                self.end = Position(number, after)
                if record.kind is not RecordKind.SEALED:
                    yield Position(number, at), record
                at = after

    def _invalid(self, path: Path, segment: Segment, position: Position, last: bool) -> None:
        """Torn, if it is at the very end and was never committed; damage otherwise."""
        if not last or segment.committed_beyond(position.offset):
            raise JournalError(
                f"{path} is damaged at byte {position.offset}: the record there is not what was written. "
                "Records before it are whole"
            )
        start = position if segment.whole else Position(position.segment, 0)
        self.torn = TornTail(start, segment.size - start.offset)


def read(folder: Path, start: Position | None = None) -> Reader:
    """A Reader over a journal; see there for what it raises."""
    return Reader(folder, start)
