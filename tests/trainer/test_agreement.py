"""At equal weights both sides score a token alike, at the first batch and ever after."""

from __future__ import annotations

import logging

import pytest
import torch

from headway.algo import Objective, PolicyStats
from headway.errors import TrainingStopped
from headway.trainer import Agreement
from headway_kernels.policy_loss import policy_loss


def apart(distance: float) -> PolicyStats:
    """Of a batch whose largest |pi - mu| is the distance."""
    mu, ones = torch.tensor([-1.0, -2.0, -0.5]), torch.ones(3)
    logp = mu + torch.tensor([0.0, distance, -distance / 2])
    return policy_loss(logp, mu, ones, ones, objective=Objective(), segments=None).stats


def test_a_first_batch_that_disagrees_stops_the_run() -> None:
    Agreement(0.05).check(apart(1e-5), 0, 0)
    with pytest.raises(TrainingStopped, match=r"max \|pi - mu\| = 0.3.*shifted"):
        Agreement(0.05).check(apart(0.3), 0, 0)


def test_tokens_that_lag_may_differ_and_a_batch_of_nothing_says_nothing() -> None:
    agreement = Agreement(0.05)
    agreement.check(apart(9.0), 1, 0)
    agreement.check(PolicyStats.zero(), 0, 1)
    with pytest.raises(TrainingStopped):
        agreement.check(apart(9.0), 0, 2)


def test_a_distance_at_lag_0_that_grows_with_the_steps_stops_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where every push carries the first weights: each update takes the learner further away."""
    agreement = Agreement(0.05)
    agreement.check(apart(0.0), 0, 0)
    agreement.check(apart(0.02), 0, 1)
    with caplog.at_level(logging.WARNING):
        agreement.check(apart(0.06), 0, 2)
        agreement.check(apart(0.5), 2, 3)  # lags: no witness
        agreement.check(apart(0.10), 0, 4)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert "(step 2, 1 such" in warnings[0]
    assert "(step 4, 2 such" in warnings[1]
    with pytest.raises(TrainingStopped, match=r"step 5.*They agreed before: what is pushed does not reach"):
        agreement.check(apart(0.14), 0, 5)


def test_a_single_batch_apart_is_forgiven_once_the_next_agrees() -> None:
    agreement = Agreement(0.05)
    for step, distance in enumerate((0.0, 0.2, 0.2, 0.0, 0.2, 0.2, 0.0)):
        agreement.check(apart(distance), 0, step)
