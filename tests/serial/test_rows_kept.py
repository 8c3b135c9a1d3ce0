"""A learner outlives who writes its metrics: its checkpoints hold the rows of that while, not the last one alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headway.checkpoint import CheckpointStore
from headway.checkpoint.resume import _rows_of
from headway.config import RunConfig, RunFolder
from headway.learner import checkpoints
from headway.serial import SerialRun


@pytest.mark.parametrize(("kept_s", "first"), [(30.0, 1), (0.0, 4)])
def test_each_checkpoint_holds_the_rows_of_the_last_seconds(
    tiny_config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept_s: float,
    first: int,
) -> None:
    monkeypatch.setattr(checkpoints, "ROWS_KEPT_S", kept_s)
    config = tiny_config(steps=4, checkpoint={"interval": 1, "keep": 4})
    folder = RunFolder(tmp_path / "run", "run")
    folder.path.mkdir()
    run = SerialRun(config, folder=folder)
    try:
        for record in run.steps():
            assert run.checkpoints.save_last(record.step, stopped=False)
    finally:
        run.close()
    store = CheckpointStore(folder.checkpoints(config), 4)
    assert store.names()[0] == "0.4"
    assert [row.step for row in _rows_of(store.open("0.4"))] == list(range(first, 5))
