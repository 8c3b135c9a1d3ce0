"""Where the rows of a run go. A sink takes one record per optimizer step and, last, how the run ended.

The engine owns the sinks of a run and feeds all of them from one thread: JsonlSink writes the files of the
run folder, the views of headway.launch show it, and a program may give its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Protocol

import msgspec

from headway.types import LearnerStatus, StepRecord


class MetricsSink(Protocol):
    """One consumer of a run's rows."""

    def step(self, record: StepRecord) -> None:
        """One optimizer step."""
        ...

    def note(self, text: str) -> None:
        """One line for people: a restart, a warning, a notice of the learner."""
        ...

    def finish(self, status: LearnerStatus) -> None:
        """How the run ended. Called once, last, on success, failure and signal alike."""
        ...


class JsonlSink:
    """metrics.jsonl, one JSON object a line, and summary.json at the end.

    Rows of kind "step" increase strictly in `step`; a step whose gradient was not finite made no update and
    is a row of kind "skipped"; the last row has kind "status". Each row reaches the file before the call
    returns.
    """

    def __init__(self, metrics: Path, summary: Path) -> None:
        """
        Args:
            metrics: appended to; the rows it holds already decide which step comes next.
            summary: written whole at the end.
        """
        self._summary = summary
        self._last_step = _last_step(metrics)
        self._file: IO[bytes] = metrics.open("ab", buffering=0)
        if metrics.stat().st_size and not metrics.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # a torn row must not take the next one with it

    def step(self, record: StepRecord) -> None:
        """Appends the record.

        Raises:
            ValueError: the step is not larger than the last one.
        """
        if record.skipped:
            self._row("skipped", record)
            return
        if record.step <= self._last_step:
            raise ValueError(f"step {record.step} after step {self._last_step}: rows increase strictly")
        self._last_step = record.step
        self._row("step", record)

    def note(self, text: str) -> None:
        """Notes are in the logs of the processes, not among the metrics."""

    def finish(self, status: LearnerStatus) -> None:
        """Appends the status row and writes the summary."""
        self._row("status", status)
        self.close()
        write_summary(self._summary, status)

    def close(self) -> None:
        """Closes the file without a status row; `finish` does it too."""
        self._file.close()

    def _row(self, kind: str, values: StepRecord | LearnerStatus) -> None:
        self._file.write(_line(kind, values) + b"\n")


class MemorySink:
    """Keeps what it is given: for tests and for programs that look at a run afterwards."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.notes: list[str] = []
        self.status: LearnerStatus | None = None

    def step(self, record: StepRecord) -> None:
        """Keeps the record."""
        self.records.append(record)

    def note(self, text: str) -> None:
        """Keeps the note."""
        self.notes.append(text)

    def finish(self, status: LearnerStatus) -> None:
        """Keeps the status."""
        self.status = status


def write_summary(path: Path, status: LearnerStatus) -> None:
    """The status as JSON under `updates` (its step) and the status's own names; whole or not at all."""
    values = msgspec.structs.asdict(status)
    values["updates"] = values.pop("step")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=1) + b"\n")
    temporary.replace(path)


def rewind(metrics: Path, abandoned: Path, step: int, rows: Sequence[StepRecord]) -> None:
    """Make a metrics file that of a run whose last row is that of `step`; whole or not at all.

    Later rows, and status rows, move to the end of `abandoned`. Rows up to `step` that the file lacks, because
    their writer died first, are taken from `rows`. The file is durable on return.

    Args:
        rows: of a checkpoint of `step`: the newest, without gaps.
    """
    kept: dict[int, list[bytes]] = {}
    moved: list[bytes] = []
    last_times = {row.time_s for row in rows}
    for row in _rows(metrics):
        kind, at = row.get("kind"), row.get("step")
        line = msgspec.json.encode(row)
        skipped = kind == "skipped" and isinstance(at, int) and (at < step or row.get("time_s") in last_times)
        if skipped or (kind == "step" and isinstance(at, int) and at <= step):
            assert isinstance(at, int)
            kept.setdefault(at, []).append(line)
        else:
            moved.append(line)
    for record in rows:
        if not record.skipped and not any(b'"kind":"step"' in line for line in kept.get(record.step, ())):
            kept.setdefault(record.step, []).insert(0, _line("step", record))
    if moved:
        with abandoned.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in moved))
            file.flush()
            os.fsync(file.fileno())
    temporary = metrics.with_name(f".{metrics.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(b"".join(line + b"\n" for at in sorted(kept) for line in kept[at]))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(metrics)


def read_records(path: Path) -> list[StepRecord]:
    """The rows of kind "step" of a metrics file; a torn last line is left out."""
    return [msgspec.convert(row, StepRecord) for row in _rows(path) if row.get("kind") == "step"]


def _line(kind: str, values: StepRecord | LearnerStatus) -> bytes:
    return msgspec.json.encode({"kind": kind, **msgspec.structs.asdict(values)})


def _rows(path: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            rows.append(msgspec.json.decode(line, type=dict[str, object]))
        except msgspec.DecodeError:
            continue
    return rows


def _last_step(path: Path) -> int:
    steps = [row["step"] for row in _rows(path) if row.get("kind") == "step"]
    return max((step for step in steps if isinstance(step, int)), default=0)
