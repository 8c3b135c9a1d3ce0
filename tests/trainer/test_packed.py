"""Packed rows, shared prefixes and splits change no log-prob, no gradient and no loss."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headway.buffer import Group

LENGTHS = ((1, 2), (3, 5), (8, 13), (21, 34))
TEMPERATURES = (0.3, 0.6, 1.0, 1.3)


@pytest.fixture
def branching(groups_of: Callable[..., list[Group]]) -> list[Group]:
    """Groups whose completions share prefixes of their own; a temperature each."""
    return groups_of(
        [(6, 1, 4, 6), (3, 3, 9), (12, 2), (5, 5, 5, 5)],
        alphabet=2,
        temperatures=TEMPERATURES,
        drift=0.3,
        seed=4,
    )


def oracle_gradient(plain: Any, alone: Callable[..., Any], groups: list[Group], cap: float) -> dict[str, Any]:
    """d/dtheta of sum(-sg(min(r, cap)) A logp) / tokens, A = batch-normalised advantages, by autograd in float64."""
    plain.zero_grad()
    centred = [np.array([t.reward for t in group.trajectories]) for group in groups]
    centred = [rewards - rewards.mean() for rewards in centred]
    std = np.sqrt(np.mean(np.concatenate(centred) ** 2)) + 1e-6
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group, advantages in zip(groups, centred, strict=True):
        for trajectory, advantage in zip(group.trajectories, advantages / std, strict=True):
            logp = alone(plain, trajectory)
            behaviour = torch.from_numpy(trajectory.logprobs[trajectory.loss_mask].astype(np.float64))
            ratio = (logp.detach() - behaviour).exp().clamp(max=cap)
            total = total - (ratio * advantage * logp).sum()
            count += len(logp)
    (total / count).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


@pytest.mark.parametrize("share", ["none", "prompt", "tree", "auto"])
@pytest.mark.parametrize("tokens_per_row", [1000, 24])
def test_logprobs_and_gradients_equal_one_by_one(
    bench: Callable[..., Any],
    plain: Any,
    alone: Callable[..., Any],
    branching: list[Group],
    monkeypatch: pytest.MonkeyPatch,
    share: str,
    tokens_per_row: int,
) -> None:
    found = bench(batch={"share_prefix": share, "tokens_per_row": tokens_per_row})
    trajectories = [trajectory for group in branching for trajectory in group.trajectories]
    for trajectory, logprobs in zip(trajectories, found.logprobs(branching), strict=True):
        with torch.no_grad():
            assert np.abs(logprobs - alone(plain, trajectory).numpy()).max() <= 1e-5
    gradient, stats = found.gradient(branching, monkeypatch)
    assert (len(stats.batch.rows) > 1) == (tokens_per_row == 24)
    if share != "none":
        assert stats.batch.num_forwarded < stats.batch.num_unshared
    expected = oracle_gradient(plain, alone, branching, cap=5.0)
    difference = norm = 0.0
    for spec in found.policy.manifest.tensors:
        got = gradient[spec.offset : spec.offset + spec.size].view(spec.shape).double()
        difference += float((got - expected[spec.name]).pow(2).sum())
        norm += float(expected[spec.name].pow(2).sum())
    assert norm > 1e-3
    assert difference**0.5 <= 1e-6 * norm**0.5


OBJECTIVES = [
    {"objective": "cispo"},
    {"objective": "grpo", "correction": "tis"},
    {"objective": "dapo", "dual_clip": 3.0},
    {"objective": "dr_grpo"},
    {"objective": "rloo"},
    {"objective": "gspo"},
    {"objective": "cispo", "entropy_coef": 0.05},
]


@pytest.mark.parametrize("algo", OBJECTIVES, ids=lambda algo: "-".join(map(str, algo.values())))
def test_gradient_and_loss_do_not_depend_on_rows_or_order(
    bench: Callable[..., Any],
    groups_of: Callable[..., list[Group]],
    monkeypatch: pytest.MonkeyPatch,
    algo: dict[str, Any],
) -> None:
    groups = groups_of(LENGTHS, drift=0.2, prompt=1)
    shuffled = list(groups)
    random.Random(3).shuffle(shuffled)
    # other ticket ids, so another packing order, and members turned round
    renumbered = [renumber(group, 9 - group.ticket_id) for group in groups]
    cases = [
        (groups, 1000, "none"), (groups, 45, "none"), (groups, 34, "none"), (groups, 1000, "auto"),
        (groups, 34, "auto"), (shuffled, 4096, "auto"), (renumbered, 45, "auto"),
    ]  # fmt: skip
    results, rows = [], []
    for batch, tokens_per_row, share in cases:
        each = bench(batch={"tokens_per_row": tokens_per_row, "share_prefix": share}, algo=algo)
        gradient, stats = each.gradient(batch, monkeypatch)
        results.append((gradient, stats.loss, stats.policy.ess))
        rows.append(len(stats.batch.rows))
    assert rows[:3] == [1, 2, 3]
    gradient, loss, ess = results[0]
    assert gradient.norm() > 1e-3
    for other, other_loss, other_ess in results[1:]:
        assert (other - gradient).norm() <= 1e-6 * gradient.norm()
        assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-7)
        assert other_ess == pytest.approx(ess, rel=1e-6)


def renumber(group: Group, ticket_id: int) -> Group:
    ticket = msgspec.structs.replace(group.ticket, ticket_id=ticket_id)
    members = group.trajectories[::-1]
    trajectories = [msgspec.structs.replace(t, ticket_id=ticket_id, member=k) for k, t in enumerate(members)]
    return dataclasses.replace(group, ticket=ticket, trajectories=trajectories)


def test_eight_rows_of_one_sequence_each(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = groups_of([(10, 11), (12, 10), (11, 12), (12, 12)], drift=0.2)
    gradients = []
    for tokens_per_row, rows in ((1000, 1), (34, 4), (17, 8)):
        each = bench(batch={"tokens_per_row": tokens_per_row, "share_prefix": "none"})
        gradient, stats = each.gradient(groups, monkeypatch)
        assert len(stats.batch.rows) == rows
        gradients.append(gradient)
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() <= 1e-6 * gradients[0].norm()


def test_a_batch_in_which_nothing_has_a_reward_makes_no_update(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]]
) -> None:
    each = bench()
    before = each.policy.flat.clone()
    stats = each.trainer.step(groups_of([(3, 4)], rewards=lambda draw: None), 1)
    assert stats.skipped
    assert stats.batch.num_loss_tokens == 0
    assert torch.equal(each.policy.flat, before)


def test_members_without_a_reward_carry_no_loss_and_the_others_are_baselined_on_those_present(
    bench: Callable[..., Any], groups_of: Callable[..., list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = groups_of([(5, 6, 7), (4, 4)], drift=0.1)
    (first, missing, last), pair = groups[0].trajectories, groups[1]
    silent = msgspec.structs.replace(missing, reward=None)
    gradient, stats = bench().gradient(
        [dataclasses.replace(groups[0], trajectories=[first, silent, last]), pair], monkeypatch
    )
    expected, _ = bench().gradient(
        [dataclasses.replace(groups[0], trajectories=[first, last]), pair], monkeypatch
    )
    assert stats.batch.num_loss_tokens == 5 + 7 + 4 + 4
    assert (gradient - expected).norm() <= 1e-6 * expected.norm()
