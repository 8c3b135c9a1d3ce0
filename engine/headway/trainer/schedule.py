"""Learning-rate schedules."""

from __future__ import annotations

import math

from headway.config import LearnerConfig


def learning_rate(config: LearnerConfig, step: int, num_steps: int, *, peak: float) -> float:
    """The rate of the update that makes step `step` (from 1) of `num_steps`.

    Linear warm-up over warmup_steps, then constant, or linear / cosine down to min_lr_share * peak at the end.
    """
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.schedule == "constant":
        return peak
    span = max(1, num_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (config.min_lr_share + (1.0 - config.min_lr_share) * left)
