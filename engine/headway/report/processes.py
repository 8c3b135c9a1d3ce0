"""What each process of a run did when, read from the files that headway.telemetry.spans writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.telemetry import Header

PARTS = ("work", "push", "idle", "other")
MAX_PROCESSES = 32  # read and drawn: the learner and the first generators
GAP_S = 0.05  # two slices that lie further apart are of two lives of a process

_Slice = tuple[int, int, int, int, int, int, int, int]
_SLICE = msgspec.json.Decoder(_Slice)
_HEADER = msgspec.json.Decoder(Header)


@dataclass(frozen=True)
class Process:
    """The slices of all processes that had one name, one after another.

    Attributes:
        name: "learner", "generator 0"; side: "learner" or "generator".
        slices: float64 [N, 6]: begin and end as Unix time, and the seconds of each of PARTS between them.
        counts: float64 [N, 2]: how often work began in each slice, and the tokens that were sampled.
    """

    name: str
    side: str
    slices: NDArray[np.float64]
    counts: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 2)))

    def coarse(self, most: int) -> NDArray[np.float64]:
        """At most about `most` slices: neighbours are summed, never across a gap."""
        slices = self.slices
        if len(slices) <= most:
            return slices
        gap = np.concatenate(([True], slices[1:, 0] - slices[:-1, 1] > GAP_S))
        first = np.flatnonzero(gap | (np.arange(len(slices)) % -(-len(slices) // most) == 0))
        last = np.append(first[1:], len(slices)) - 1
        parts = np.add.reduceat(slices[:, 2:], first, axis=0)
        return np.column_stack((slices[first, 0], slices[last, 1], parts))


class ProcessReader:
    """Reads the files of a folder; a later read takes in only what was written since.

    A torn last line is left for the next read; a line that is neither a slice nor a header is passed over.
    """

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: spans/ of a run; it need not be there.
        """
        self._folder = folder
        self._files: dict[Path, _File] = {}

    def read(self) -> list[Process]:
        """The learner, then the generators by their number; of more than MAX_PROCESSES the first."""
        for path in sorted(self._folder.glob("*.jsonl")):
            self._files.setdefault(path, _File(path)).read()
        slices: dict[tuple[bool, int, str, str], list[NDArray[np.float64]]] = {}
        for file in self._files.values():
            for header, rows in file.lives:
                if rows:
                    key = (header.side != "learner", _number(header.process), header.process, header.side)
                    slices.setdefault(key, []).append(_seconds(header.unix_s, rows))
        found: list[Process] = []
        for (_, _, name, side), parts in sorted(slices.items())[:MAX_PROCESSES]:
            whole = np.concatenate(sorted(parts, key=lambda part: part[0, 0]))
            found.append(Process(name, side, whole[:, :6], whole[:, 6:]))
        return found


class _File:
    """One file: the headers in it, each with its slices."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.lives: list[tuple[Header, list[_Slice]]] = []

    def read(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return  # gone, or not ours to read: the rest of the page does not need it
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        for line in text[:whole].splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        header = line.find(b"{")  # behind a torn slice, where a process died in mid-line and came back
        try:
            if header >= 0:
                self.lives.append((_HEADER.decode(line[header:]), []))
            elif self.lives:
                self.lives[-1][1].append(_SLICE.decode(line))
        except (msgspec.MsgspecError, RecursionError):
            return


def _seconds(unix_s: float, rows: list[_Slice]) -> NDArray[np.float64]:
    slices = np.array([[float(value) for value in row] for row in rows], np.float64)
    slices[:, :6] /= 1e9
    slices[:, :2] += unix_s
    return slices


def _number(name: str) -> int:
    digits = name.rpartition(" ")[2]
    return int(digits) if digits.isdecimal() and len(digits) < 10 else 0
