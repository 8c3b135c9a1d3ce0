"""A sink on a thread of its own: whatever it does, and however long it takes, the run does not wait for it.

Waits for: rows, on its thread. Unblocked by: `step` and `finish` of the feeding thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from headway.telemetry.sanitise import printable
from headway.telemetry.sink import MetricsSink
from headway.types import LearnerStatus, StepRecord

QUEUED = 1000  # rows that wait for a slow sink; those beyond are counted as lost
FINISH_S = 20.0


class Detached:
    """Feeds a sink from a bounded queue; a failure is said once, and what was lost is counted.

    A row on which the sink raised, and one that found the queue full, are lost; the next ones are tried again.

    Attributes:
        num_lost: rows that the sink does not have.
    """

    def __init__(
        self,
        name: str,
        sink: MetricsSink,
        say: Callable[[str], None],
        queued: int = QUEUED,
        finish_s: float = FINISH_S,
    ) -> None:
        """
        Args:
            name: for messages. say: takes a line for people; called on the feeding thread.
            queued: rows that may wait. finish_s: how long `finish` waits for the sink to end.
        """
        self._name = name
        self._sink = sink
        self._say = say
        self._finish_s = finish_s
        self._rows: queue.Queue[StepRecord | LearnerStatus] = queue.Queue(queued)
        self._num_rows = self._num_failed = self._num_full = 0
        self._cause = ""
        self._said = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"sink-{name}", daemon=True)
        self._thread.start()

    @property
    def num_lost(self) -> int:
        """Rows that the sink does not have."""
        return self._num_failed + self._num_full

    def step(self, record: StepRecord) -> None:
        """Hands the record over; never waits."""
        self._num_rows += 1
        try:
            self._rows.put_nowait(record)
        except queue.Full:
            self._num_full += 1
            self._cause = self._cause or f"it is {self._rows.maxsize} rows behind"
        self._tell()

    def note(self, text: str) -> None:
        """Notes are for people."""

    def finish(self, status: LearnerStatus) -> None:
        """Waits until the sink has ended, `finish_s` at most; says what it does not have."""
        end_s = time.monotonic() + self._finish_s
        try:
            self._rows.put(status, timeout=self._finish_s)
            self._ended.wait(max(0.0, end_s - time.monotonic()))
        except queue.Full:
            pass
        self._tell()
        if not self._ended.is_set():
            waiting = self._rows.qsize()
            self._say(
                f"telemetry: {self._name} did not end within {self._finish_s:g} s; {waiting} rows were waiting"
            )
        if self.num_lost:
            self._say(
                f"telemetry: {self._name} lacks {self.num_lost} of {self._num_rows} rows; metrics.jsonl has all"
            )

    def _tell(self) -> None:
        if self._cause and not self._said:
            self._said = True
            self._say(
                f"telemetry: {self._name} fails, the run goes on without what it loses: {printable(self._cause)}"
            )

    def _work(self) -> None:
        while True:
            row = self._rows.get()
            try:
                if isinstance(row, LearnerStatus):
                    self._sink.finish(row)
                else:
                    self._sink.step(row)
            except Exception as error:  # whatever a library raises must not end the run
                self._num_failed += not isinstance(row, LearnerStatus)
                self._cause = self._cause or f"{type(error).__name__}: {error}"
            if isinstance(row, LearnerStatus):
                self._ended.set()
                return
