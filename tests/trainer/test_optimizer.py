"""The flat optimizer against torch's own on separate tensors; masters; the guard against values that are no numbers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.buffer import Group
from headway.config import LearnerConfig
from headway.errors import TrainingStopped
from headway.model import Policy, load_policy
from headway.trainer import FlatOptimizer

LENGTHS = [(4, 9), (6, 5)]


def constant(policy: Policy, value: float) -> None:
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.fill_(value)


def test_updates_equal_adamw_over_separate_tensors_with_norm_clipping(folder: Path) -> None:
    config = LearnerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.7, beta1=0.8, beta2=0.95, eps=1e-6)
    policy = load_policy(folder, with_grad=True)
    optimizer = FlatOptimizer(policy, config)
    separate = {name: p.detach().clone().requires_grad_() for name, p in policy.module.named_parameters()}
    decayed = [p for p in separate.values() if p.dim() >= 2]
    rest = [p for p in separate.values() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.8, 0.95), eps=1e-6, lr=1e-3,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    for step in range(5):
        scale = 10.0 ** (step - 3)  # below and above the clip
        for name, parameter in policy.module.named_parameters():
            gradient = scale * torch.randn(parameter.shape, generator=draw)
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)
            separate[name].grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(separate.values(), 0.7)
        for group in adamw.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        adamw.step()
        result = optimizer.update(1e-3 * (step + 1))
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert not result.skipped
        assert policy.grad is not None
        assert not policy.grad.any()
    for name, parameter in policy.module.named_parameters():
        assert (parameter - separate[name]).abs().max() <= 1e-6, name


def test_small_steps_move_the_masters_and_what_is_published_only_at_bf16_steps(folder: Path) -> None:
    policy = load_policy(folder, published_dtype="bfloat16", with_grad=True)
    constant(policy, 1.0)
    # A bf16 step below 1 is 2^-8, rounded half way: 1 - 2^-9. Start some elements just above that edge.
    edge = policy.manifest.tensors[0]
    with torch.no_grad():
        policy.flat[edge.offset : edge.offset + 100] = 1.0 - 2**-9 + 5e-4
    optimizer = FlatOptimizer(policy, LearnerConfig(max_grad_norm=1e9))
    used = torch.zeros(policy.flat.shape, dtype=torch.bool)
    for spec in policy.manifest.tensors:
        used[spec.offset : spec.offset + spec.size] = True
    master_before = optimizer.master.clone()
    sizes = 0.5 + torch.rand(policy.flat.shape, generator=torch.Generator().manual_seed(0))  # constant sign
    num_changes = 0
    for _ in range(1000):
        assert policy.grad is not None
        policy.grad.copy_(sizes * used)
        before = policy.flat.clone()
        optimizer.update(1e-6)
        assert torch.equal(policy.flat, optimizer.master.to(torch.bfloat16).float())
        num_changes += int((policy.flat != before).sum())
    moved = (master_before - optimizer.master)[used]
    assert moved.min() >= 0.95e-3
    assert moved.max() <= 1.05e-3
    assert num_changes == 100  # only those that crossed an edge, once


def test_fp32_masters_are_the_policy_itself(folder: Path) -> None:
    policy = load_policy(folder, with_grad=True)
    assert FlatOptimizer(policy, LearnerConfig()).master.data_ptr() == policy.flat.data_ptr()


def state(each: Any) -> list[torch.Tensor]:
    """Weights, masters and moments."""
    moments = [value for entry in each.optimizer._adamw.state.values() for value in entry.values()]
    return [each.policy.flat.clone(), each.optimizer.master.clone(), *copy.deepcopy(moments)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_and_the_run_goes_on_as_if_it_had_not_been(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]], dtype: str, value: float
) -> None:
    each, calm = (bench(push={"dtype": dtype}) for _ in range(2))
    batches = [groups_of(LENGTHS, seed=seed, drift=0.1) for seed in range(3)]
    for trainer in (each, calm):
        assert not trainer.trainer.step(batches[0], 1).skipped
    before = state(each)
    each.policy.grad[123] = value
    stats = each.trainer.step(batches[1], 2)
    assert stats.skipped
    assert not np.isfinite(stats.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(state(each), before, strict=True))
    assert not each.policy.grad.any()
    for trainer in (each, calm):
        assert not trainer.trainer.step(batches[2], 2).skipped
    assert all(torch.equal(a, b) for a, b in zip(state(each), state(calm), strict=True))


def test_an_input_that_is_not_a_number_is_a_skipped_step_that_names_its_trajectories(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]], caplog: pytest.LogCaptureFixture
) -> None:
    each, good = bench(), groups_of(LENGTHS)
    bad = groups_of(LENGTHS, seed=5)
    bad[1].trajectories[0].logprobs[-1] = np.nan
    before = state(each)
    with caplog.at_level(logging.WARNING):
        assert each.trainer.step(bad, 1).skipped
    assert "step 1 makes no update" in caplog.text
    assert "g0.1.0" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(state(each), before, strict=True))
    assert not each.policy.grad.any()
    assert not each.trainer.step(good, 1).skipped


def test_skipped_steps_in_a_row_stop_the_training_with_the_ids(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]]
) -> None:
    each = bench(learner={"max_skipped": 3})
    groups = groups_of(LENGTHS)

    def poisoned(step: int) -> Any:
        each.policy.grad[7] = float("nan")
        return each.trainer.step(groups, step)

    assert poisoned(1).skipped
    assert poisoned(1).skipped
    assert not each.trainer.step(groups, 1).skipped  # the count starts anew
    assert poisoned(2).skipped
    assert poisoned(2).skipped
    with pytest.raises(TrainingStopped, match=r"3 steps in a row .*g0\.0\.0, g0\.0\.1, g0\.1\.0, g0\.1\.1"):
        poisoned(2)


def test_weights_that_are_not_finite_are_noticed_at_the_loss(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]]
) -> None:
    each = bench()
    with torch.no_grad():
        each.policy.flat[50] = float("nan")
    stats = each.trainer.step(groups_of(LENGTHS), 1)
    assert stats.skipped


def test_changing_lr_takes_effect_at_the_next_step(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]]
) -> None:
    each, groups = bench(learner={"lr": 1e-3}), groups_of(LENGTHS)
    assert each.trainer.step(groups, 1).lr == 1e-3
    each.trainer.lr = 0.0
    before = each.policy.flat.clone()
    stats = each.trainer.step(groups, 2)
    assert stats.lr == 0.0
    assert torch.equal(each.policy.flat, before)
