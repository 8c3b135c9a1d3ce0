"""Before the first update both sides score the same tokens at equal weights; what differs is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headway.buffer import Group
from headway.config import derived
from headway.errors import TrainingStopped
from headway.trainer import Distance, StartCheck, Trainer
from headway.trainer.start_check import PATIENCE
from headway.types import PolicyVersion, VersionSpan

LENGTHS = [[9, 14, 21, 30], [12, 17, 25, 33], [8, 16, 24, 40], [10, 20, 30, 40]]


@pytest.fixture
def checked(bench: Callable[..., Any]) -> Callable[..., Trainer]:
    """A trainer as a run makes it, with its check."""

    def make(**changes: Any) -> Trainer:
        made = bench(**changes)
        limits = derived.agreement_limits(made.config)
        check = StartCheck(limits, derived.numerics(made.config, made.policy.attention.name))
        return Trainer(made.policy, made.config, made.recipe, None, check)

    return make


def rescored(groups: list[Group], module: Any, alone: Callable[..., Any], temperature: float) -> list[Group]:
    """The same groups with log-probs as a generator of this module and temperature reports them."""
    for group in groups:
        for trajectory in group.trajectories:
            other = msgspec.structs.replace(trajectory, temperature=temperature)
            with torch.no_grad():
                trajectory.logprobs[trajectory.loss_mask] = alone(module, other).float().numpy()
    return groups


def test_a_healthy_first_batch_trains_and_says_how_near_it_was(
    checked: Callable[..., Trainer], groups_of: Callable[..., list[Group]]
) -> None:
    trainer = checked()
    stats = trainer.step(groups_of(LENGTHS, temperatures=(0.7, 1.0, 1.3)), 1)
    assert stats.start_check is not None
    assert stats.start_check.num_tokens == sum(map(sum, LENGTHS))
    assert stats.start_check.largest < 1e-4
    assert stats.start_check.ess > 0.999
    assert not stats.skipped
    assert trainer.step(groups_of(LENGTHS), 2).start_check is None  # settled


@pytest.mark.parametrize(
    ("reported", "sampled"), [(0.8, 1.0), (1.0, 0.7)], ids=["of another temperature", "raw at T = 0.7"]
)
def test_log_probs_of_another_temperature_are_refused_before_an_update(
    checked: Callable[..., Trainer],
    groups_of: Callable[..., list[Group]],
    plain: Any,
    alone: Callable[..., Any],
    reported: float,
    sampled: float,
) -> None:
    trainer = checked()
    before = trainer.policy.flat.clone()
    groups = rescored(groups_of(LENGTHS, temperatures=(sampled,)), plain, alone, reported)
    with pytest.raises(TrainingStopped) as caught:
        trainer.step(groups, 1)
    message = str(caught.value)
    assert f"over {sum(map(sum, LENGTHS))} tokens at lag 0" in message
    for named in ("mean |pi - mu|", "agreement.mean_log_ratio allows 0.001", "float32 on cpu", "head: float32",
                  "attention '", "full softmax at temperature"):  # fmt: skip
        assert named in message
    assert torch.equal(trainer.policy.flat, before)


def test_a_generator_that_computes_in_another_dtype_is_refused(
    checked: Callable[..., Trainer], groups_of: Callable[..., list[Group]], folder: Any, alone: Any
) -> None:
    from transformers import AutoModelForCausalLM

    half = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.bfloat16, attn_implementation="eager"
    )
    groups = rescored(groups_of(LENGTHS), half.eval(), alone, 1.0)
    with pytest.raises(TrainingStopped, match=r"mean \|pi - mu\| = 0\.0"):
        checked().step(groups, 1)
    # told so, the bounds are those of bfloat16, and the same log-probs are as near as they can be
    stats = checked(learner={"dtype": "bfloat16"}, push={"dtype": "bfloat16"}).step(groups, 1)
    assert stats.start_check is not None
    assert stats.start_check.mean > 1e-3


def test_only_trajectories_wholly_of_these_weights_bear_witness(
    checked: Callable[..., Trainer], groups_of: Callable[..., list[Group]], plain: Any, alone: Any
) -> None:
    """After a resume at step 5 the first batch may hold nothing at lag 0: the check waits for one that does."""

    def sampled_by(step: int, groups: list[Group]) -> list[Group]:
        for group in groups:
            group.trajectories[:] = [
                msgspec.structs.replace(
                    t, spans=[VersionSpan(s.start, s.end, PolicyVersion(0, step)) for s in t.spans]
                )
                for t in group.trajectories
            ]
        return groups

    trainer = checked(learner={"lr": 0.0})
    wrong = rescored(groups_of(LENGTHS), plain, alone, 0.5)
    assert trainer.step(sampled_by(4, wrong), 6).start_check is None
    mixed = sampled_by(5, groups_of(LENGTHS))
    mixed[0].trajectories[0] = msgspec.structs.replace(
        mixed[0].trajectories[0],
        logprobs=mixed[0].trajectories[0].logprobs - 1.0,
        spans=[VersionSpan(5, 8, PolicyVersion(0, 4)), VersionSpan(8, 14, PolicyVersion(0, 5))],
    )
    stats = trainer.step(mixed, 6)
    assert stats.start_check is not None
    assert stats.start_check.num_tokens == sum(map(sum, LENGTHS)) - 9
    assert stats.start_check.largest < 1e-4


def test_a_check_that_never_meets_lag_0_says_so_once(
    checked: Callable[..., Trainer], groups_of: Callable[..., list[Group]]
) -> None:
    trainer = checked(learner={"lr": 0.0})
    warnings = [
        trainer.step(groups_of([[3, 4]]), 6).warning for _ in range(PATIENCE + 2)
    ]  # sampled by step 0
    assert [bool(each) for each in warnings] == [False] * (PATIENCE - 1) + [True, False, False]
    assert "after 20 batches 0 of 200 tokens were at lag 0" in warnings[PATIENCE - 1]


def test_few_tokens_are_judged_but_do_not_end_the_check(
    checked: Callable[..., Trainer], groups_of: Callable[..., list[Group]], plain: Any, alone: Any
) -> None:
    trainer = checked(learner={"lr": 0.0})
    few = [[3, 4], [2, 5]]
    first = trainer.step(groups_of(few), 1).start_check
    assert first is not None
    assert first.num_tokens == 14
    with pytest.raises(TrainingStopped, match="mean"):
        trainer.step(rescored(groups_of(LENGTHS), plain, alone, 0.5), 1)


def test_the_distance_against_a_hand_made_one() -> None:
    difference = np.array([0.1, -0.2, 0.0, 0.4])
    ratio = np.exp(difference)
    distance = Distance.of(torch.from_numpy(difference))
    assert distance.mean == pytest.approx(0.175)
    assert distance.largest == pytest.approx(0.4)
    assert distance.ess == pytest.approx(ratio.sum() ** 2 / (4 * (ratio**2).sum()))
    assert len(Distance.of(torch.tensor([float("nan")])).faults(derived.DEFAULT_LIMITS["bfloat16"])) == 3
