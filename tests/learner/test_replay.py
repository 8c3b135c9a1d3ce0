"""Replay of a small run on one thread, whose journal the test keeps: equal bits, and what makes them differ."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint import Attempts, CheckpointStore
from headway.config import RunConfig, RunFolder
from headway.engine import start_run
from headway.errors import CheckpointError, JournalError, ReplayRefused
from headway.journal import Journal, Position
from headway.journal.segment import segment_path, segments
from headway.learner.machine import Machine
from headway.learner.replay import replay
from headway.serial.run import SerialRun
from headway.types import PolicyVersion
from headway.wire import encode

NUM_STEPS = 6


def record(config: RunConfig) -> RunFolder:
    """Run it, with a journal of many segments; returns its folder."""
    started = start_run(config)
    folder = started.folder
    Attempts(folder).write_machine(0, Machine.current().encode())
    run = SerialRun(config, folder=folder, attempt=started.attempt)
    desk = run.desk
    take = desk.on_message
    desk.on_message = lambda address, message, frames=(): take(  # as the intake gets them
        address, message, encode(message)
    )
    with Journal.open(folder.journal, max_bytes=1 << 30, segment_bytes=4000) as journal:
        desk.chronicle.journal = journal
        desk.chronicle.opened(folder.run_id, PolicyVersion(0, 0))
        settings: Any = run.settings
        settings._on_change = lambda step, change: desk.chronicle.changed(step, change.key, change.value)
        for row in run.steps():
            if row.step == 2:
                run.set("learner.lr", "3e-3")
            if row.step == 3:
                run.set("algo.cap", "2.5")
            run.checkpoints.maybe_save(run.version.step)
            desk.chronicle.commit()
        run.checkpoints.save_last(run.version.step, stopped=False)
        run.close()
    started.lock.release()
    return folder


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    config = {
        "steps": NUM_STEPS,
        "run_dir": str(tmp_path_factory.mktemp("recorded") / "run"),
        "model": {"path": str(tiny_model)},
        "env": {"name": "sort", "args": {"digits": 4, "seed": 5, "reward": "sum7"}},
        "batch": {"prompts": 2, "samples": 4},
        "sampling": {"max_new_tokens": 6},
        "learner": {"lr": 1e-3, "threads": 1},
        "generator": {"threads": 1, "max_running": 4},
        "checkpoint": {"interval": 2, "keep": 9},
        "staleness": {"max_lag": 2, "unit": "token"},
    }
    return record(RunConfig.model_validate(config))


@pytest.fixture
def folder(recorded: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy to spoil."""
    shutil.copytree(recorded.path, tmp_path / "run")
    return RunFolder(tmp_path / "run", recorded.run_id)


def test_a_run_is_made_again_bit_for_bit_from_any_checkpoint(recorded: RunFolder) -> None:
    whole = replay(recorded.path)
    assert whole.difference == ""
    assert (whole.num_updates, whole.end) == (NUM_STEPS, PolicyVersion(0, NUM_STEPS))
    assert whole.pushed == [PolicyVersion(0, step) for step in range(1, NUM_STEPS + 1)]
    assert whole.checkpoints == ["0.2", "0.4", "0.6"]
    part = replay(recorded.path, start="2", end="4")
    assert (part.difference, part.num_updates, part.checkpoints) == ("", 2, ["0.4"])
    with pytest.raises(CheckpointError, match=r"no checkpoint 0\.9 .* 0\.6, 0\.4, 0\.2"):
        replay(recorded.path, start="0.9")


def test_the_first_step_that_differs_is_named(folder: RunFolder) -> None:
    recipe = Attempts(folder).recipe(0)
    text = recipe.read_text()
    assert "max_grad_norm = " in text
    recipe.write_text(re.sub(r"max_grad_norm = \S+", "max_grad_norm = 1e-3", text))
    verdict = replay(folder.path)
    assert verdict.difference.startswith("version 0.1: ")
    assert verdict.num_updates == 1


def test_another_machine_is_refused_with_the_differences(folder: RunFolder) -> None:
    facts = json.loads(Attempts(folder).machine(0))
    other = {**facts, "processor": "Another 9000", "python": "2.7"}
    Attempts(folder).write_machine(0, json.dumps(other).encode())
    with pytest.raises(ReplayRefused, match=r"attempt 0: processor: Another 9000 then, (?s:.*)--any-machine"):
        replay(folder.path)
    lines: list[str] = []
    assert replay(folder.path, end="2", any_machine=True, note=lines.append).difference == ""
    assert any("Another 9000" in line for line in lines)


def test_segments_that_retention_removed_are_named_and_a_later_start_does_without_them(
    folder: RunFolder,
) -> None:
    needed = CheckpointStore(folder.path / "checkpoints").open("0.4").marker.journal
    for path in segments(folder.journal):
        if path < Position.parse(needed).segment:
            segment_path(folder.journal, path).unlink()
    last = Position.parse(needed).segment - 1
    assert last > 1
    with pytest.raises(JournalError, match=f"segments 1 to {last} were removed by retention"):
        replay(folder.path)
    assert replay(folder.path, start="4").checkpoints == ["0.6"]


def test_a_damaged_journal_is_not_replayed(folder: RunFolder) -> None:
    path = segment_path(folder.journal, 2)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(JournalError, match=f"{path.name} is damaged at byte"):
        replay(folder.path)
