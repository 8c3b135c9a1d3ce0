"""Choosing what a run goes on from: the checkpoint, the recipe with its changes, and the rows so far. No torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.checkpoint.attempts import Attempt, Attempts
from headway.checkpoint.lock import RunLock
from headway.checkpoint.store import Checkpoint, CheckpointStore
from headway.config import RunConfig, RunFolder, load_recipe, open_run, paths, save
from headway.config.checks import value_of
from headway.config.loading import Overrides, dotted
from headway.errors import CheckpointError, ConfigError, RunLocked
from headway.telemetry import rewind
from headway.types import PolicyVersion, StepRecord

WRITER_WAIT_S = 30.0
INITIAL = "initial"  # in place of a checkpoint's name: the weights that the run began with

# Another value would make the stored state that of another run.
FIXED = (
    "name", "seed", "model.path", "model.lora.rank", "model.lora.alpha", "model.lora.targets", "env.name", "env.args",
    "env.shuffle", "push.dtype", "checkpoint.dir",
)  # fmt: skip
PIECES = {
    "optimizer": "optimizer.safetensors",
    "rng": "rng.msgpack",
    "cursor": "cursor.json",
    "desk": "desk.msgpack",
    "journal": "",
}


class _Rows(msgspec.Struct, frozen=True):
    """The part of a checkpoint's progress that this module reads."""

    rows: list[StepRecord]


@dataclass(frozen=True)
class Resumed:
    """A run that is about to go on.

    Attributes:
        lock: held; attempt: already noted.
        lines: what people should know: what it goes on from, what was skipped, what has changed.
    """

    folder: RunFolder
    config: RunConfig
    attempt: Attempt
    lock: RunLock
    lines: list[str]


def resume_run(
    path: Path, overrides: Overrides, *, checkpoint: str = "", without: Sequence[str] = ()
) -> Resumed:
    """Get a run ready to go on.

    Args:
        path: of its folder. overrides: changes of the recipe.
        checkpoint: name of the one to go on from, or its step, or INITIAL; "": the newest complete one, or, when
            the run has not written any, the initial weights.
        without: pieces to do without; they start anew.

    Raises:
        ConfigError: not a run's folder; a change that a resume does not allow, or that is impossible.
        RunLocked: the run is still being worked on.
        CheckpointError: no checkpoint is complete, or not the one that is asked for.
    """
    unknown = sorted(set(without) - set(PIECES))
    if unknown:
        raise ConfigError([("--without", f"no piece {unknown[0]!r}; there are: {', '.join(PIECES)}")])
    folder, stored = open_run(path)
    folder = RunFolder(folder.path.absolute(), folder.run_id)
    lock = RunLock(folder.path)
    try:
        _await_writer(folder)
        store = CheckpointStore(folder.checkpoints(stored), stored.checkpoint.keep)
        store.tidy()
        chosen, lines = _choose(store, folder, checkpoint, without)
        if lock.taken_from is not None:
            lines.insert(0, f"took the run over from process {lock.taken_from.pid}, which is dead")
        base = load_recipe(chosen.path / "recipe.toml") if chosen else stored
        config, changes = _changed(base, overrides, folder)
        lines += changes
        step = chosen.marker.version.step if chosen else 0
        if step > config.steps:
            raise ConfigError(
                [("steps", f"{config.steps}: {step} updates are done; give more: --steps {2 * step}")]
            )
        if step == config.steps and _is_closed(folder):
            raise ConfigError([("steps", f"all {step} updates are done; give more: --steps {2 * step}")])
        attempt = _begin(folder, config, store, chosen, without)
    except BaseException:
        lock.release()
        raise
    return Resumed(folder, config, attempt, lock, lines)


def _is_closed(folder: RunFolder) -> bool:
    """Whether the run was ended in order. One that was killed after its last update still lacks summary and model."""
    try:
        summary: object = json.loads(folder.summary.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and summary.get("status") == "finished"


def _choose(
    store: CheckpointStore, folder: RunFolder, name: str, without: Sequence[str]
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, verified; None for the initial weights."""
    left_out = frozenset(PIECES[piece] for piece in without)
    if name == INITIAL:
        return None, ["starts again from the initial weights"]
    if name:
        chosen = store.open(store.resolve(name), without=left_out)
        return chosen, [f"goes on from checkpoint {chosen.name} in {chosen.path}"]
    search = store.search(without=left_out)
    lines = [f"checkpoint {skipped} is skipped: {why}" for skipped, why in search.skipped]
    if search.newest is not None:
        return search.newest, [
            *lines,
            f"goes on from checkpoint {search.newest.name} in {search.newest.path}",
        ]
    if any(not skipped.startswith(".") for skipped, _ in search.skipped):
        advice = f"to start again from the initial weights: --checkpoint {INITIAL}"
        raise CheckpointError("\n".join([f"no checkpoint of {folder.path} is complete", *lines, advice]))
    return None, [*lines, "no checkpoint was written yet: starts again from the initial weights"]


def _changed(base: RunConfig, overrides: Overrides, folder: RunFolder) -> tuple[RunConfig, list[str]]:
    """The recipe of the new attempt, and its differences in words."""
    pairs, faults = dotted(overrides)
    if faults:
        raise ConfigError(faults)
    stored: dict[str, Any] = dict(dotted(base.model_dump())[0])
    config = load_recipe(None, {**stored, **dict(pairs), "run_dir": str(folder.path)})
    lines: list[str] = []
    for path in paths.fields():
        before, after = value_of(base, path), value_of(config, path)
        if before == after or path == "run_dir":
            continue
        if path in FIXED:
            faults.append(
                (path, f"{before!r} cannot become {after!r}: the state of the run is that of the first")
            )
        lines.append(f"{path}: {before!r} -> {after!r}")
    if faults:
        raise ConfigError(faults)
    return config, lines or ["the recipe is as it was"]


def _begin(
    folder: RunFolder,
    config: RunConfig,
    store: CheckpointStore,
    chosen: Checkpoint | None,
    without: Sequence[str],
) -> Attempt:
    start = chosen.marker.version if chosen else None
    rows = _rows_of(chosen) if chosen else []
    rewind(folder.metrics, folder.abandoned, start.step if start else 0, rows)
    store.set_aside(start or PolicyVersion(0, -1))
    folder.summary.unlink(missing_ok=True)
    if folder.policy.exists():
        shutil.rmtree(folder.policy)
    save(config, folder.config)
    return Attempts(folder).begin(config, chosen.name if chosen else "", start, without)


def _rows_of(checkpoint: Checkpoint) -> list[StepRecord]:
    path = checkpoint.path / "progress.msgpack"
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=_Rows).rows
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _await_writer(folder: RunFolder) -> None:
    """Waits for: the learner of the attempt before, which ends itself within seconds of its supervisor's death.

    Raises:
        RunLocked: it has not within WRITER_WAIT_S.
    """
    path = folder.journal / "lock"
    if not path.exists():
        return
    end = time.monotonic() + WRITER_WAIT_S
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() > end:
                raise RunLocked(
                    f"a learner still writes the journal in {folder.journal}, {WRITER_WAIT_S:g} s after its "
                    "supervisor is gone; end that process first"
                )
            time.sleep(0.05)
    finally:
        os.close(fd)
