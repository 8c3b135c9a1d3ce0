"""Rows as TensorBoard event files, written without TensorFlow and without torch.

TensorBoard keeps single precision: its numbers are those of metrics.jsonl rounded to float32.
"""

from __future__ import annotations

from pathlib import Path

# Generated modules, whose classes exist at run time only.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from headway.telemetry.scalars import scalars
from headway.types import LearnerStatus, StepRecord


class TensorBoardSink:
    """One event file per attempt of a run, in one folder: TensorBoard shows them as one run.

    The first event of a file says at which step it begins, so that TensorBoard leaves out what an earlier attempt
    wrote of steps that a resume has rolled back.
    """

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: of the event files; made if need be.
        """
        self._writer = EventFileWriter(str(folder))
        self._begun = False

    def step(self, record: StepRecord) -> None:
        """Every number of an update; one that was skipped is left out, as it has no step of its own."""
        if record.skipped:
            return
        if not self._begun:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=record.time_s, step=record.step, session_log=start))
            self._begun = True
        values = [Summary.Value(tag=name, simple_value=number) for name, number in scalars(record).items()]
        self._writer.add_event(
            Event(wall_time=record.time_s, step=record.step, summary=Summary(value=values))
        )
        self._writer.flush()

    def note(self, text: str) -> None:
        """Notes are for people."""

    def finish(self, status: LearnerStatus) -> None:
        """Closes the file."""
        self._writer.close()
