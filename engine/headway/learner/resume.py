"""A new attempt goes on where a checkpoint, and what the journal holds beyond it, leave off."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

from headway.checkpoint import Attempt, CheckpointStore
from headway.config import RunConfig, RunFolder, load_toml
from headway.errors import JournalError
from headway.journal import Entry, Position, read, unpack
from headway.learner.desk import Desk
from headway.learner.live import Settings
from headway.learner.records import Recorder
from headway.learner.recovery import Recovered, Recovery
from headway.learner.setup import LearnerParts, make_gate, staleness_policy
from headway.learner.state import LearnerState, RngState
from headway.staleness import Gate

_log = logging.getLogger(__name__)


def resume_parts(
    parts: LearnerParts, config: RunConfig, attempt: Attempt, state: LearnerState | None
) -> LearnerParts:
    """The parts of an attempt: weights, optimizer, cursor and gate as the checkpoint has them.

    Args:
        parts: as built from the recipe; state: None for the initial weights.
    """
    gate = _gate(config, attempt, state)
    if state is None or state.rng is None:
        RngState.seed(config.seed)
    if state is not None:
        parts.trainer.restore(state.progress.trainer, state.tensors)
        parts.trainer.lr = config.learner.lr  # changes made live are in the config, changes of the resume too
        if state.cursor is not None:
            parts.prompts.restore(state.cursor.prompts)
        if state.rng is not None:
            state.rng.restore()
    return dataclasses.replace(parts, gate=gate)


def _gate(config: RunConfig, attempt: Attempt, state: LearnerState | None) -> Gate:
    new = make_gate(config)
    gate = Gate(new.policy, version=attempt.version, lineage=attempt.lineage, unit=new.unit)
    if state is None or state.desk is None:
        return gate
    before = state.asked
    gate.policy = staleness_policy(before)
    gate.restore(state.desk.gate)
    if (before.staleness, before.batch, before.push) != (config.staleness, config.batch, config.push):
        gate.adopt(new.policy)
    return gate


def resume_desk(
    folder: RunFolder,
    config: RunConfig,
    attempt: Attempt,
    parts: LearnerParts,
    state: LearnerState | None,
    desk: Desk,
) -> Recovered:
    """Fill a desk that is as new, before anybody joins, and before the journal is written again.

    Raises:
        CheckpointError: the buffer cannot be read.
        JournalError: the journal is damaged beyond the checkpoint.
    """
    if state is not None and state.desk is not None:
        desk.restore(state.desk.desk)
        desk.buffer.restore(state.desk.unpack())
    round_start = state.desk.desk.round_start if state is not None and state.desk is not None else 0
    recovery = Recovery(
        config, desk.buffer, parts.prompts, parts.tickets, desk.arrivals.receipts, round_start
    )
    return recovery.run(_entries(folder, config, attempt))


def resume_rows(state: LearnerState | None, settings: Settings, recorder: Recorder) -> None:
    """The sums over the rows so far, and the settings that target_ess had moved."""
    if state is None:
        return
    progress = state.progress
    recorder.restore(progress.recorder)
    settings.restore(state.asked, load_toml(progress.in_force), progress.ess)


def _entries(folder: RunFolder, config: RunConfig, attempt: Attempt) -> Iterator[Entry]:
    """What the journal holds beyond the attempt's checkpoint."""
    start: Position | None = None
    if "journal" in attempt.without:
        return
    if attempt.checkpoint:
        marker = CheckpointStore(folder.checkpoints(config)).open(attempt.checkpoint, verify=False).marker
        if not marker.journal:
            return
        start = Position.parse(marker.journal)
    try:
        reader = read(folder.journal, start)
    except JournalError as error:
        if attempt.checkpoint:
            raise JournalError(f"{error}; to go on without it: --without journal") from None
        _log.info("no journal to go on from: %s", error)
        return
    for _, record in reader:
        yield unpack(record.kind, record.payload)
    if reader.torn is not None:
        _log.warning("the journal: %s", reader.torn)
