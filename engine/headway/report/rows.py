"""The rows of a run, read from its folder as they are; again and again while the run goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.config import RunConfig, open_run
from headway.launch.tally import Tally
from headway.report.processes import Process, ProcessReader
from headway.types import LearnerStatus, StepRecord

Row = Mapping[str, object]


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells it.

    Attributes:
        path: of the folder; config: the recipe it began with.
        steps: rows of kind "step", in order, as written (a number that was not finite is None).
        skipped: rows of kind "skipped".
        status: how it ended; until then the sums over the rows so far, with the status "running".
        processes: what each of them did when; empty where the run does not record it.
    """

    path: Path
    config: RunConfig
    steps: list[Row]
    skipped: list[Row]
    status: LearnerStatus
    processes: list[Process]

    @property
    def ended(self) -> bool:
        """Whether the last row says how the run ended."""
        return self.status.status != "running"


class RunReader:
    """Reads a run's rows; a later read takes in only what was written since.

    A torn last line is left for the next read. A file that was replaced or cut (a resume) is read anew.
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: folder of the run.

        Raises:
            ConfigError: it is not that of a run.
        """
        self._folder, self._config = open_run(path)
        self._processes = ProcessReader(self._folder.spans)
        self._begin()

    def read(self) -> RunData:
        """The run as of now."""
        self._take_new()
        status = self._status or self._tally.status("running", "")
        return RunData(
            self._folder.path,
            self._config,
            list(self._steps),
            list(self._skipped),
            status,
            self._processes.read(),
        )

    def _begin(self) -> None:
        self._inode = self._offset = 0
        self._steps: list[Row] = []
        self._skipped: list[Row] = []
        self._status: LearnerStatus | None = None
        self._tally = Tally()

    def _take_new(self) -> None:
        try:
            file = self._folder.metrics.open("rb")
        except FileNotFoundError:
            self._begin()
            return
        with file:
            facts = self._folder.metrics.stat()
            if facts.st_ino != self._inode or facts.st_size < self._offset:
                self._begin()
                self._inode = facts.st_ino
            file.seek(self._offset)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        for line in text[:whole].splitlines():
            self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            row = msgspec.json.decode(line, type=dict[str, object])
        except msgspec.DecodeError:
            return  # a line that a killed writer left torn
        kind = row.pop("kind", None)
        if kind == "step":
            self._steps.append(row)
            self._status = None
            self._tally.add(record_of(row))
        elif kind == "skipped":
            self._skipped.append(row)
        elif kind == "status":
            self._status = msgspec.convert(row, LearnerStatus)


def record_of(row: Row) -> StepRecord:
    """The row as a StepRecord; JSON has no NaN, so a number that was not finite comes back as NaN."""
    return msgspec.convert(
        {name: math.nan if value is None else value for name, value in row.items()}, StepRecord
    )
