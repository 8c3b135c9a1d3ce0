"""Where time goes, with one side three times as slow as the other: the parts are the wall time, the idle side idles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import headway
from headway.planner import constant
from headway.report import RunReader
from headway_bench.shaped.play import recipe
from headway_bench.shaped.shape import Shape, ShapeFile

TOKENS = 20
STEP_S = 0.01


@pytest.mark.slow
@pytest.mark.parametrize("learner_is", ["three times slower", "three times faster"])
def test_the_parts_sum_to_the_wall_time_and_the_faster_side_idles(tmp_path: Path, learner_is: str) -> None:
    generation_s = TOKENS * STEP_S  # of all groups that are out at once
    slower = learner_is == "three times slower"
    shape = Shape(
        decode=constant(STEP_S), train=constant(3.0 * generation_s if slower else generation_s / 3.0),
        mean=TOKENS, sigma=0.0, longest=TOKENS,
    )  # fmt: skip
    file = tmp_path / "shape.json"
    ShapeFile(shape, 1).write(file)
    sections = recipe(shape, steps=16, staleness={"max_lag": 1, "window": 1})
    program = [sys.executable, "-P", "-m", "headway_bench.shaped.child", str(file)]
    with headway.Engine(None, program=program, run_dir=str(tmp_path / "run"), seed=1, **sections) as engine:
        rows = list(engine)
    assert engine.status is not None
    assert engine.status.status == "finished", engine.status.cause
    wall_s = rows[-1].elapsed_s - rows[0].elapsed_s
    assert sum(row.learner.total for row in rows[1:]) == pytest.approx(wall_s, rel=0.01)
    learner, generator = RunReader(tmp_path / "run").read().processes
    idle: dict[str, float] = {}
    for process in (learner, generator):
        slices = process.slices
        assert slices[:, 2:].sum() == pytest.approx(slices[-1, 1] - slices[0, 0], rel=0.01)
        # the steady part: between the second row and the last but one
        inside = slices[(slices[:, 0] >= rows[1].time_s) & (slices[:, 1] <= rows[-2].time_s)]
        idle[process.side] = inside[:, 4].sum() / inside[:, 2:].sum()
    faster, slow = ("generator", "learner") if slower else ("learner", "generator")
    assert idle[faster] > 0.4
    assert idle[faster] > idle[slow] + 0.3
