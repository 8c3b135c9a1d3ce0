"""Learning rates by step, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from headway.config import LearnerConfig
from headway.trainer import learning_rate

CASES = [
    ({"schedule": "constant"}, [1.0, 1.0, 1.0, 1.0, 1.0]),
    ({"schedule": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0]),
    ({"schedule": "linear"}, [0.8, 0.6, 0.4, 0.2, 0.0]),
    ({"schedule": "linear", "min_lr_share": 0.5}, [0.9, 0.8, 0.7, 0.6, 0.5]),
    ({"schedule": "linear", "warmup_steps": 1}, [1.0, 0.75, 0.5, 0.25, 0.0]),
    ({"schedule": "cosine"}, [0.5 + 0.5 * math.cos(math.pi * k / 5) for k in range(1, 6)]),
    ({"schedule": "cosine", "warmup_steps": 3, "min_lr_share": 0.1}, [1 / 3, 2 / 3, 1.0, 0.55, 0.1]),
    ({"schedule": "linear", "warmup_steps": 9}, [k / 9 for k in range(1, 6)]),
]


@pytest.mark.parametrize(("change", "expected"), CASES, ids=[str(change) for change, _ in CASES])
def test_rates_of_five_updates(change: dict[str, object], expected: list[float]) -> None:
    config = LearnerConfig.model_validate({"lr": 123.0, **change})
    for peak in (1.0, 2e-6):
        found = [learning_rate(config, step, 5, peak=peak) for step in range(1, 6)]
        assert found == pytest.approx([peak * share for share in expected], abs=1e-12 * peak)


def test_steps_past_the_end_keep_the_last_rate() -> None:
    for schedule in ("linear", "cosine"):
        config = LearnerConfig.model_validate({"schedule": schedule, "min_lr_share": 0.2})
        assert learning_rate(config, 8, 5, peak=1.0) == pytest.approx(0.2)
