"""Where a record lies: its segment, and its first byte there."""

from __future__ import annotations

import msgspec


class Position(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Ordered as the records were appended; the end of the journal is a position too.

    Attributes:
        segment: number of the segment file, from 1.
        offset: byte in it, past its header.
    """

    segment: int
    offset: int

    def __str__(self) -> str:
        return f"{self.segment}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """The inverse of str().

        Raises:
            ValueError: no position.
        """
        segment, colon, offset = text.partition(":")
        if not (colon and segment.isdecimal() and offset.isdecimal()):
            raise ValueError(f"got position {text[:40]!r}; expected SEGMENT:OFFSET")
        return cls(int(segment), int(offset))
