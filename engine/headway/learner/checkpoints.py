"""A learner's checkpoints: what is copied when, and what a new attempt goes on from.

The copy is made between two optimizer steps: tensors into memory that is kept for it, the rest under the desk's
lock. Everything else (encoding, writing, fsync) is the writing thread's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headway.buffer import Held
from headway.checkpoint import Attempt, Checkpoint, CheckpointStore, Marker, Saver, Snapshot
from headway.config import RunConfig, RunFolder, to_toml
from headway.journal import Position
from headway.learner.desk import Desk
from headway.learner.live import Settings
from headway.learner.records import Recorder
from headway.learner.setup import LearnerParts
from headway.learner.state import (
    FILES,
    CursorPiece,
    DeskPiece,
    DeskState,
    LearnerState,
    Piece,
    Progress,
    RngState,
    pack_held,
    read_state,
    tensor_pieces,
)
from headway.staleness import GateState
from headway.trainer import FlatState
from headway.types import StepRecord

Lock = contextlib.AbstractContextManager[object]
ROWS_KEPT_S = 30.0  # as long as a learner may outlive its supervisor, which writes the metrics


@dataclass(frozen=True)
class _DeskCopy:
    """The desk's state as copied under its lock; trajectories are shared, for they never change."""

    gate: GateState
    desk: DeskState
    held: list[Held]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(
            DeskPiece(self.gate, self.desk, [pack_held(held) for held in self.held])
        )


class Checkpoints:
    """The checkpoints of one learner.

    Args:
        folder, config, attempt: of the run.
        parts, desk, settings, recorder: whose state it is. lock: held to look at the desk.
        note: told what people should know.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        attempt: Attempt,
        parts: LearnerParts,
        desk: Desk,
        settings: Settings,
        recorder: Recorder,
        lock: Lock,
        note: Callable[[str], None],
    ) -> None:
        self._run_id = folder.run_id
        self._attempt = attempt
        self._parts = parts
        self._desk = desk
        self._settings = settings
        self._recorder = recorder
        self._chronicle = desk.chronicle
        self._lock = lock
        self._stop_within_s = config.checkpoint.stop_within_s
        self._staging: FlatState | None = None
        self._rows: list[tuple[float, StepRecord]] = []  # with the monotonic time of each
        self._num_rows = 0  # of those, in the checkpoint that is being written
        self._store = CheckpointStore(folder.checkpoints(config), config.checkpoint.keep)
        self._saver = Saver(self._store, config.checkpoint.interval, self._capture, note, self._saved)

    def row(self, record: StepRecord) -> None:
        """A step's row: the checkpoints of the next ROWS_KEPT_S have it, should its way into the metrics be cut off.

        Who writes the metrics may have died, and this process goes on, and saves, until it has noticed.
        """
        self._rows.append((time.monotonic(), record))

    def maybe_save(self, step: int) -> None:
        """See Saver.maybe_save."""
        self._saver.maybe_save(step)
        if not self._saver.on:
            self._rows.clear()

    def save_last(self, step: int, *, stopped: bool) -> bool:
        """A checkpoint of the end, within checkpoint.stop_within_s when the run was stopped; whether there is one."""
        within_s = 0.5 * self._stop_within_s if stopped else 3600.0
        return self._saver.save_last(step, within_s)

    def take_blocked_s(self) -> float:
        """See Saver.take_blocked_s."""
        return self._saver.take_blocked_s()

    def _capture(self) -> Snapshot:
        manifest = self._parts.policy.manifest
        if self._staging is None:
            self._staging = FlatState.empty(manifest.num_elements)
        trainer = self._parts.trainer.copy_state(self._staging)
        with self._lock:
            gate = self._desk.gate
            version, ledger = gate.version, gate.ledger
            journal = self._chronicle.journal
            position = "" if journal is None else str(journal.end)
            copy = _DeskCopy(gate.state(), self._desk.state(), self._desk.buffer.held())
            cursor = CursorPiece(self._parts.prompts.state(), ledger.frontier, ledger.ended_beyond_frontier())
        rows = [record for _, record in self._rows]
        self._num_rows = len(rows)
        progress = Progress(
            version=version,
            manifest=manifest.digest,
            trainer=trainer,
            in_force=to_toml(self._settings.config),
            ess=self._settings.ess_state,
            recorder=self._recorder.state(),
            rows=rows,
        )
        rng, recipe = RngState.current(), to_toml(self._settings.asked).encode()
        lineage = self._attempt.lineage
        marker = Marker(0, self._run_id, version, lineage, position, time.time(), {})
        pieces = {
            **tensor_pieces(self._staging, manifest),
            FILES[Piece.PROGRESS]: lambda: [memoryview(msgspec.msgpack.encode(progress))],
            FILES[Piece.RECIPE]: lambda: [memoryview(recipe)],
            FILES[Piece.RNG]: lambda: [memoryview(msgspec.msgpack.encode(rng))],
            FILES[Piece.CURSOR]: lambda: [memoryview(msgspec.json.encode(cursor))],
            FILES[Piece.DESK]: lambda: [memoryview(copy.encode())],
        }
        return Snapshot(marker, pieces, self._chronicle.commit)

    def _saved(self, checkpoint: Checkpoint) -> None:
        """The journal before the oldest checkpoint that is kept may go."""
        horizon = time.monotonic() - ROWS_KEPT_S
        del self._rows[: sum(at < horizon for at, _ in self._rows[: self._num_rows])]
        oldest = self._store.oldest()
        if oldest is not None and oldest.marker.journal:
            self._chronicle.needed = Position.parse(oldest.marker.journal)


def open_state(
    folder: RunFolder, config: RunConfig, attempt: Attempt, parts: LearnerParts
) -> LearnerState | None:
    """The state that an attempt starts from; None for the initial weights.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete, or of another model.
    """
    if not attempt.checkpoint:
        return None
    left_out = frozenset(FILES[Piece(piece)] for piece in attempt.without)
    checkpoint = CheckpointStore(folder.checkpoints(config)).open(attempt.checkpoint, without=left_out)
    return read_state(checkpoint, parts.policy.manifest, attempt.without)
