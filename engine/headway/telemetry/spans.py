"""What a process did when, in a file of the run's folder: the timeline of `headway report`.

One JSON line per slice of time, [begin_ns, end_ns, work, push, idle, other, turns, sampled]: nanoseconds since the
header's `unix_s`, what of them went where, how often work began, and tokens sampled. Slices follow each other without
gaps, and their parts sum to what the process's SplitClock says, exactly. A stretch of states that change within
milliseconds is one slice, so that a file grows with what there is to see.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal

import msgspec

State = Literal["work", "push", "idle", "other"]
STATES: tuple[State, ...] = ("work", "push", "idle", "other")

SHORT_NS = 2_000_000  # a state that lasts less than this does not begin a slice
LONG_NS = 500_000_000  # a slice of short states ends here
FLUSH_NS = 200_000_000  # what a killed process loses, besides the slice that it was in
COARSER = 20_000  # slices after which both bounds double: a run of weeks stays readable
_log = logging.getLogger(__name__)


class Header(msgspec.Struct, frozen=True):
    """The first line of a file, and of each process that goes on with it.

    Attributes:
        process: "learner", "generator 0"; side: "learner" or "generator"; unix_s: Unix time of nanosecond 0.
    """

    process: str
    side: str
    pid: int
    host: str
    unix_s: float


class SpanLog:
    """Writes the slices of one process; called by the thread that owns its clock.

    A file that cannot be written ends the recording, with a line in the process's log, and nothing else.

    Attributes:
        sampled: tokens sampled so far; set by whoever knows.
    """

    def __init__(self, path: Path, header: Header, begin_ns: int) -> None:
        """
        Args:
            path: appended to; its folder is made. begin_ns: nanosecond 0 of the header, on the clock's clock.
        """
        self.sampled: Callable[[], int] = lambda: 0
        self._path = path
        self._zero = self._begin = self._end = self._flushed = begin_ns
        self._spent: dict[State, int] = dict.fromkeys(STATES, 0)
        self._last: State = "other"
        self._turns = self._sampled = self._seen = self._num = 0
        self._short, self._long = SHORT_NS, LONG_NS
        self._lines: list[bytes] = [msgspec.json.encode(header)]
        self._file: IO[bytes] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            self._fails(error)
        self._flush(begin_ns)

    def add(self, state: State, begin_ns: int, end_ns: int) -> None:
        """The process was in `state` from `begin_ns`, where the last call ended, to `end_ns`."""
        if self._file is None:
            return
        if self._ends_before(state, end_ns - begin_ns):
            self._emit(begin_ns)
        self._spent[state] += end_ns - begin_ns
        self._turns += state == "work"
        self._end, self._last, self._seen = end_ns, state, self.sampled()

    def close(self) -> None:
        """Writes what is left and closes the file. Idempotent."""
        if self._file is not None:
            self._emit(self._end)
            self._flush(self._end)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _ends_before(self, state: State, lasts_ns: int) -> bool:
        """Whether the slice so far ends where this state begins."""
        so_far = self._end - self._begin
        if so_far < self._short:
            return False
        if lasts_ns < self._short:
            return so_far >= self._long
        return state != self._last or self._spent[state] < so_far

    def _emit(self, end_ns: int) -> None:
        if end_ns > self._begin:
            row = (
                self._begin - self._zero, end_ns - self._zero, *self._spent.values(), self._turns,
                self._seen - self._sampled,
            )  # fmt: skip
            self._lines.append(msgspec.json.encode(row))
            self._sampled, self._num = self._seen, self._num + 1
        self._begin, self._turns = end_ns, 0
        self._spent = dict.fromkeys(STATES, 0)
        if self._num >= COARSER:
            self._num, self._short, self._long = 0, 2 * self._short, 2 * self._long
        if end_ns - self._flushed >= FLUSH_NS:
            self._flush(end_ns)

    def _flush(self, now_ns: int) -> None:
        self._flushed = now_ns
        lines, self._lines = self._lines, []
        if self._file is None or not lines:
            return
        try:
            self._file.write(b"".join(line + b"\n" for line in lines))
        except OSError as error:
            self._fails(error)

    def _fails(self, error: OSError) -> None:
        _log.warning("the timeline of this process is not recorded any more: %s: %s", self._path, error)
        file, self._file = self._file, None
        if file is not None:
            file.close()


def spans_in(folder: Path | None, process: str, side: str, name: str) -> Callable[[int], SpanLog] | None:
    """What opens a SpanLog for this process when its clock starts; None without a folder.

    Args:
        process, side: see Header. name: of the file, without its ending.
    """
    if folder is None:
        return None
    header = Header(process, side, os.getpid(), socket.gethostname(), time.time())
    return lambda begin_ns: SpanLog(folder / f"{name}.jsonl", header, begin_ns)
