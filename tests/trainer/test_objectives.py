"""One step of every objective: its ratio is the generator's, it raises what it should, KL pulls to the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.buffer import Group
from headway.model import load_policy
from headway.trainer import prepare

OBJECTIVES = [
    {"objective": "cispo"},
    {"objective": "grpo"},
    {"objective": "grpo", "correction": "tis"},
    {"objective": "dapo"},
    {"objective": "dr_grpo"},
    {"objective": "rloo"},
    {"objective": "gspo"},
    {"objective": "ppo"},
    {"objective": "reinforce_pp"},
    {"objective": "decoupled_ppo"},
    {"objective": "grpo", "correction": "icepop", "correction_level": "sequence"},
    {"objective": "sapo"},
    {"objective": "dppo_tv"},
    {"objective": "m2po"},
    {"objective": "vtrace"},
]
LENGTHS = [(4, 9, 6, 5), (12, 2, 7, 7), (3, 3, 8, 5)]


def weighted_logprob(each: Any, groups: list[Group]) -> float:
    """sum(weight x advantage x log-prob): what a policy gradient climbs on-policy."""
    prepared = prepare(groups, each.config.batch, each.recipe, each.config.sampling.max_new_tokens)
    scores = iter(each.logprobs(groups))
    factors: dict[int, list[float]] = {}
    for row in prepared.rows:
        values = (row.token_weight * row.advantage).double().tolist()
        for sequence, value in zip(row.row.sequence.tolist(), values, strict=True):
            factors.setdefault(sequence, []).append(value)
    return sum(float(np.dot(factors[sequence], next(scores))) for sequence in sorted(factors))


@pytest.mark.parametrize("algo", OBJECTIVES, ids=lambda algo: "-".join(map(str, algo.values())))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_on_policy_raises_the_weighted_logprob_and_its_ratio_is_one(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]], algo: dict[str, Any], dtype: str
) -> None:
    each = bench(algo=algo, push={"dtype": dtype}, learner={"lr": 3e-3, "weight_decay": 0.0})
    groups = groups_of(LENGTHS)
    if dtype == "bfloat16":  # the generators sampled with the rounded weights
        for trajectory, logprobs in zip(
            (t for g in groups for t in g.trajectories), each.logprobs(groups), strict=True
        ):
            trajectory.logprobs[trajectory.loss_mask] = logprobs
    before = weighted_logprob(each, groups)
    stats = each.trainer.step(groups, 1)
    assert not stats.skipped
    assert stats.lr == 3e-3
    assert stats.grad_norm > 1e-3
    assert stats.policy.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert stats.policy.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert stats.policy.ess == pytest.approx(1.0, abs=1e-5)
    assert stats.policy.clip_share == 0.0
    assert abs(stats.policy.kl_behaviour) <= 1e-6
    assert stats.batch.num_loss_tokens == sum(map(sum, LENGTHS))
    after = weighted_logprob(each, groups)
    assert after > before + 1e-3


def test_off_policy_the_ratio_is_to_the_generators_logprobs_and_clipping_fires(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]], plain: Any, alone: Callable[..., Any]
) -> None:
    each = bench(algo={"objective": "grpo"})
    groups = groups_of(LENGTHS, temperatures=(1.0, 0.6, 1.3))
    with torch.no_grad():  # theta1: a big move away from the weights that sampled
        noise = torch.Generator().manual_seed(1)
        each.policy.flat.add_(0.05 * torch.randn(each.policy.flat.shape, generator=noise))
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    ratios = [
        np.exp(logprobs - trajectory.logprobs[trajectory.loss_mask])
        for trajectory, logprobs in zip(trajectories, each.logprobs(groups), strict=True)
    ]
    ratio = np.concatenate(ratios).astype(np.float64)
    stats = each.trainer.step(groups, 1)
    assert stats.policy.ratio_mean == pytest.approx(ratio.mean(), rel=1e-5)
    assert stats.policy.ratio_max == pytest.approx(ratio.max(), rel=1e-5)
    assert stats.policy.ess == pytest.approx(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()), rel=1e-5)
    assert stats.policy.clip_share > 0.05
    assert ratio.std() > 0.1


def test_kl_to_the_reference_is_zero_at_the_start_and_its_gradient_vanishes(
    bench: Callable[..., Any],
    folder: Path,
    groups_of: Callable[..., list[Group]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = groups_of(LENGTHS)
    reference = load_policy(folder, with_grad=False)
    with_kl, stats = bench(reference, algo={"kl": "k3", "kl_coef": 0.5}).gradient(groups, monkeypatch)
    without, _ = bench().gradient(groups, monkeypatch)
    assert stats.policy.kl_reference == pytest.approx(0.0, abs=1e-8)
    assert (with_kl - without).norm() <= 1e-4 * without.norm()


def test_kl_alone_pulls_the_policy_back_to_the_reference(
    bench: Callable[..., Any], folder: Path, groups_of: Callable[..., list[Group]]
) -> None:
    groups = groups_of(LENGTHS, rewards=lambda draw: 1.0)  # flat: no advantage, only the KL term is left
    reference = load_policy(folder, with_grad=False)
    each = bench(reference, algo={"kl": "k3", "kl_coef": 1.0}, learner={"lr": 2e-3}, steps=30)
    with torch.no_grad():
        noise = torch.Generator().manual_seed(1)
        each.policy.flat.add_(0.02 * torch.randn(each.policy.flat.shape, generator=noise))
    kls = [each.trainer.step(groups, step).policy.kl_reference for step in range(1, 21)]
    assert kls[0] > 0.005
    assert kls[-1] < 0.25 * kls[0]


def test_the_entropy_bonus_raises_the_entropy(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]]
) -> None:
    groups = groups_of(LENGTHS, rewards=lambda draw: 1.0)
    each = bench(algo={"entropy_coef": 1.0}, learner={"lr": 3e-3})
    entropies = [each.trainer.step(groups, step).policy.entropy for step in range(1, 6)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.01


def test_flat_groups_have_no_gradient(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]]
) -> None:
    each = bench()
    before = each.policy.flat.clone()
    stats = each.trainer.step(groups_of(LENGTHS, rewards=lambda draw: 0.5), 1)
    assert (stats.grad_norm, stats.loss, stats.skipped) == (0.0, 0.0, False)
    assert torch.equal(each.policy.flat, before)


def move(each: Any, size: float = 0.05) -> None:
    """Takes the learner away from the weights that sampled."""
    with torch.no_grad():
        noise = torch.Generator().manual_seed(1)
        each.policy.flat.add_(size * torch.randn(each.policy.flat.shape, generator=noise))


@pytest.mark.parametrize("objective", ["m2po", "vtrace", "decoupled_ppo"])
def test_inputs_from_the_learner_s_scores_do_not_depend_on_the_rows(
    bench: Callable[..., Any],
    groups_of: Callable[..., list[Group]],
    monkeypatch: pytest.MonkeyPatch,
    objective: str,
) -> None:
    """M2po's mask is of the whole step; one row and several give the same gradient and statistics."""
    gradients, statistics = [], []
    for tokens_per_row in (4096, 64):
        each = bench(algo={"objective": objective}, batch={"tokens_per_row": tokens_per_row})
        move(each)
        gradient, stats = each.gradient(groups_of(LENGTHS), monkeypatch)
        assert (len(stats.batch.rows) > 1) == (tokens_per_row == 64)
        gradients.append(gradient)
        statistics.append(stats.policy)
    assert float((gradients[0] - gradients[1]).norm()) <= 1e-5 * float(gradients[0].norm())
    assert statistics[0].total("rejected") == statistics[1].total("rejected")
    if objective == "m2po":
        assert 0 < statistics[0].total("rejected") < statistics[0].num_tokens


def test_decoupled_ppo_clips_against_a_policy_one_step_after_the_generator_s(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At lag n the ratio is (pi / mu)^(1/n): it moves less the older a token is; with prox = pi nothing clips."""
    shares: dict[Any, float] = {}
    for lag in (1, 3):
        each = bench(algo={"objective": "decoupled_ppo"})
        move(each)
        stats = each.trainer.step(groups_of(LENGTHS), 1 + lag)
        shares[lag] = stats.policy.total("clipped_high") + stats.policy.total("clipped_low")
    each = bench(algo={"objective": "decoupled_ppo", "proximal": "learner"})
    move(each)
    learner = each.trainer.step(groups_of(LENGTHS), 4).policy
    assert learner.total("clipped_high") + learner.total("clipped_low") == 0
    assert shares[1] > shares[3] > 0


def test_a_batch_that_is_rejected_whole_makes_no_update_and_says_so(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]], caplog: pytest.LogCaptureFixture
) -> None:
    each = bench(algo={"objective": "grpo", "correction": "mis", "correction_cap": 1e-6})
    before = each.policy.flat.clone()
    stats = each.trainer.step(groups_of(LENGTHS), 1)
    assert stats.skipped
    assert stats.policy.rejected_share == 1.0
    assert torch.equal(each.policy.flat, before)
    assert "every token of the batch is rejected" in caplog.text
