"""What a run records in spans/ is what its clock says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.config import RunConfig, create_run
from headway.report import RunReader
from headway.serial import SerialRun


def test_the_spans_hold_the_learners_time(
    tiny_config: Callable[..., RunConfig],
) -> None:
    config = tiny_config(steps=4)
    folder = create_run(config)
    run = SerialRun(config, folder=folder)
    try:
        records = list(run.steps())
    finally:
        run.close()
    (learner,) = RunReader(folder.path).read().processes
    split = run.clock.split()
    seconds = learner.slices[:, 2:].sum(axis=0)
    assert learner.name == "learner"
    assert seconds.sum() == pytest.approx(learner.slices[-1, 1] - learner.slices[0, 0], abs=1e-5)
    assert seconds.tolist()[:3] == pytest.approx([split.work, split.push, split.idle], abs=1e-5)
    assert sum(record.learner.total for record in records) <= seconds.sum()


def test_a_run_that_records_no_spans_has_none(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config(steps=1, telemetry={"spans": False})
    folder = create_run(config)
    run = SerialRun(config, folder=folder)
    try:
        assert len(list(run.steps())) == 1
    finally:
        run.close()
    assert not folder.spans.exists()
    assert RunReader(folder.path).read().processes == []
