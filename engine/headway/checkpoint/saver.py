"""When checkpoints are taken, and who writes them: the loop copies the state, a thread writes the copy.

One checkpoint at a time is being written. A save that comes due earlier waits for it; that, and the copy, is all
that training waits for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from headway.checkpoint.store import Checkpoint, CheckpointStore, Marker, Pieces
from headway.errors import CheckpointError, HeadwayError

_log = logging.getLogger(__name__)
MAX_FAILURES = 3


@dataclass(frozen=True)
class Snapshot:
    """A copy of the state, which training does not touch any more.

    Attributes:
        marker: without files; pieces: by file name, asked for their bytes by the writing thread.
        prepare: called by that thread first: what must be on the disk before the checkpoint is.
    """

    marker: Marker
    pieces: Pieces
    prepare: Callable[[], object]


class Saver:
    """Takes a checkpoint every `interval` optimizer steps.

    Args:
        store: where they go; interval: steps, 0: never.
        capture: copies the state; the copy may share memory with the last one, whose writing has ended.
        note: told what people should know. on_saved: told each checkpoint, on the writing thread.
    """

    def __init__(
        self,
        store: CheckpointStore,
        interval: int,
        capture: Callable[[], Snapshot],
        note: Callable[[str], None],
        on_saved: Callable[[Checkpoint], None] = lambda checkpoint: None,
    ) -> None:
        self._store = store
        self._interval = interval
        self._capture = capture
        self._note = note
        self._on_saved = on_saved
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._num_failures = 0
        self._saved_step = -1
        self._blocked_s = 0.0

    @property
    def on(self) -> bool:
        """Whether this run takes checkpoints."""
        return self._interval > 0

    def maybe_save(self, step: int) -> None:
        """Take a checkpoint of the state after optimizer step `step`, if it is due and not taken yet.

        Waits for: the checkpoint before, if it is still being written.

        Raises:
            CheckpointError: MAX_FAILURES in a row could not be written.
        """
        self._collect(wait=False)
        if self.on and step % self._interval == 0 and step != self._saved_step:
            self._save(step)

    def save_last(self, step: int, within_s: float) -> bool:
        """Take a checkpoint now, if this step has none, and wait until it is written, at most `within_s`.

        Returns:
            Whether there is a complete checkpoint of this step.
        """
        if not self.on:
            return False
        end = time.monotonic() + within_s
        if self._thread is not None:
            self._thread.join(max(0.0, end - time.monotonic()))
            if self._thread.is_alive():
                return False
            self._collect(wait=True)
        if step != self._saved_step:
            self._save(step)
        if self._thread is not None:
            self._thread.join(max(0.0, end - time.monotonic()))
            if self._thread.is_alive():
                return False
            self._collect(wait=True)
        return step == self._saved_step

    def take_blocked_s(self) -> float:
        """Seconds that training stood still for checkpoints since the last call."""
        taken, self._blocked_s = self._blocked_s, 0.0
        return taken

    def _save(self, step: int) -> None:
        started = time.perf_counter()
        self._collect(wait=True)
        snapshot = self._capture()
        self._saved_step = step
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), name="headway-checkpoint", daemon=True
        )
        self._thread.start()
        self._blocked_s += time.perf_counter() - started

    def _write(self, snapshot: Snapshot) -> None:
        started = time.perf_counter()
        try:
            snapshot.prepare()
            checkpoint = self._store.write(snapshot.marker, snapshot.pieces)
            self._on_saved(checkpoint)
        except (OSError, HeadwayError) as error:
            self._error = error
            return
        _log.info("checkpoint %s written in %.2f s", checkpoint.name, time.perf_counter() - started)

    def _collect(self, *, wait: bool) -> None:
        """Take in how the last writing ended."""
        if self._thread is None or (self._thread.is_alive() and not wait):
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is None:
            self._num_failures = 0
            return
        self._saved_step = -1
        self._num_failures += 1
        message = f"checkpoint not written ({self._num_failures} in a row): {error}"
        if self._num_failures >= MAX_FAILURES:
            raise CheckpointError(f"{message}; the checkpoints before are whole")
        self._note(message)
