"""Advantages: baselines by group id, reward cleaning, groups without a gradient."""

from __future__ import annotations

import numpy as np

from headway.algo.advantages import group_advantages


def test_group_baseline_ignores_arrival_order() -> None:
    rewards, groups = np.array([1.0, 0.0, 3.0, 1.0, 0.5, 0.5]), np.array([7, 7, 2, 2, 9, 9])
    order = np.random.default_rng(0).permutation(6)
    straight = group_advantages(rewards, groups)
    shuffled = group_advantages(rewards[order], groups[order])
    assert (straight.values[order] == shuffled.values).all()
    assert list(straight.dropped) == [9]
