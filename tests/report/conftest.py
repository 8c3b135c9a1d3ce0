"""A run folder with made-up rows: every number different, lags and reasons that come and go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config import RunFolder, create_run
from headway.config.loading import validate
from headway.launch.tally import Tally
from headway.telemetry import JsonlSink
from headway.types import SettingChange, StepRecord, TimeSplit


def record(step: int, **changes: Any) -> StepRecord:
    """A row whose numbers follow from its step: two seconds an update, half of it idle."""
    part = step / 7.0
    values: dict[str, Any] = {
        name: part * (index + 1)
        for index, name in enumerate(StepRecord.__struct_fields__)
        if StepRecord.__annotations__[name] == "float"
    }
    values.update(
        {name: step + 3 for name, kind in StepRecord.__annotations__.items() if kind == "int"},
        step=step,
        epoch=0,
        time_s=1.7e9 + 2.0 * step,
        elapsed_s=2.0 * step,
        lag_histogram=[100, step, 3][: 1 + step % 3],
        learner=TimeSplit(0.7, 0.1, 1.0, 0.2),
        # The generators tell their time every fifth update.
        generator=TimeSplit(8.0, 1.0, 0.5, 0.5) if step % 5 == 0 else TimeSplit(0.0, 0.0, 0.0, 0.0),
        skipped=False,
        tickets={"issued": 4 * step, "trained": 4 * step, "dropped": 0, "in_flight": 0, "buffered": 0},
        trajectories={"received": 9 * step, "trained": 9 * step, "masked": 0, "dropped": 0, "buffered": 0},
        tokens={"received": 9 * step, "trained": 9 * step, "masked": 0, "dropped": 0, "buffered": 0},
        dropped={"stale": step // 2} if step > 3 else {},
        generators=2,
        changes=[SettingChange("staleness.max_lag", "2", "user")] if step == 3 else [],
    )
    return StepRecord(**{**values, **changes})


MakeRun = Callable[..., RunFolder]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(steps: int, *, ended: bool = True, cause: str = "", **changes: Any) -> RunFolder:
        folder = create_run(
            validate({"name": "made-up", "run_dir": str(tmp_path / "run"), "model": {"path": "random:tiny"},
                      "env": {"name": "sort"}, "steps": max(1, steps)})
        )  # fmt: skip
        sink, tally = JsonlSink(folder.metrics, folder.summary), Tally()
        for step in range(1, steps + 1):
            row = record(step, **changes)
            tally.add(row)
            sink.step(row)
        if ended:
            sink.finish(tally.status("failed" if cause else "finished", cause))
        sink.close()
        return folder

    return make
