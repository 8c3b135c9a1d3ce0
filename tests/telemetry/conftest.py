"""Rows whose numbers all differ, for sinks that must carry every one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway.types import LearnerStatus, StepRecord, TimeSplit


def _record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        name: step / 7.0 * (index + 1) if kind == "float" else step + index
        for index, (name, kind) in enumerate(StepRecord.__annotations__.items())
        if kind in ("float", "int")
    }
    values.update(
        step=step, epoch=1, time_s=1.7e9 + 2.0 * step, lag_histogram=[100, step, 3],
        learner=TimeSplit(0.7, 0.1, step / 3, 0.2), generator=TimeSplit(1.5, 0.3, 0.1, step / 11), skipped=False,
        tickets={"issued": 4 * step, "dropped.stale": step}, trajectories={"received": 9 * step},
        tokens={"received": 90 * step, "trained": 80 * step}, dropped={"stale": step, "zero_variance": 2}, changes=[],
    )  # fmt: skip
    return StepRecord(**{**values, **changes})


@pytest.fixture
def make_record() -> Callable[..., StepRecord]:
    return _record


@pytest.fixture
def finished() -> LearnerStatus:
    return LearnerStatus(
        "finished", "", 3, 6.0, 1.0, 1.0, 0.5, 1, [1], TimeSplit(1.0, 0.0, 0.0, 0.0), TimeSplit(1.0, 0.0, 0.0, 0.0),
        {}, {}, {}, {},
    )  # fmt: skip
