"""Trained over what each token was sampled from: log-probs, gradients and packing against a float64 forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from headway.buffer import Group
from headway.trainer.kept import KeptRows, KeptTable
from headway.types import KeptSets, Trajectory

from .conftest import VOCAB_SIZE

LENGTHS = [[3, 5, 8, 8], [2, 13, 6, 1]]


def kept_sets(trajectory: Trajectory, draw: np.random.Generator) -> KeptSets:
    """Each token with up to a dozen others."""
    tokens = trajectory.token_ids[trajectory.prompt_length :]
    return KeptSets.of([
        np.array(sorted({int(token), *draw.choice(VOCAB_SIZE, draw.integers(0, 12), replace=False).tolist()}), np.int32)
        for token in tokens
    ])  # fmt: skip


def masked_logprobs(module: Any, trajectory: Trajectory) -> Tensor:
    """float64 [C], differentiable."""
    assert trajectory.kept is not None
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    logits = module(input_ids=ids[None], use_cache=False).logits[0] / trajectory.temperature
    sets = np.split(trajectory.kept.ids, np.cumsum(trajectory.kept.counts)[:-1])
    out = []
    for place, kept in enumerate(sets, trajectory.prompt_length):
        row = logits[place - 1]
        out.append(row[ids[place]] - row[torch.from_numpy(kept.astype(np.int64))].logsumexp(-1))
    return torch.stack(out)


@pytest.fixture
def groups(groups_of: Callable[..., list[Group]], plain: Any) -> list[Group]:
    """Two groups whose behaviour log-probs are over their kept sets."""
    made, draw = groups_of(LENGTHS, temperatures=(0.7, 1.0)), np.random.default_rng(3)
    for group in made:
        for index, trajectory in enumerate(group.trajectories):
            trajectory = msgspec.structs.replace(trajectory, kept=kept_sets(trajectory, draw))
            with torch.no_grad():
                trajectory.logprobs[trajectory.loss_mask] = masked_logprobs(plain, trajectory).float().numpy()
            group.trajectories[index] = trajectory
    return made


@pytest.mark.parametrize("share", ["none", "prompt", "tree"])
def test_log_probs_are_over_the_kept_sets(
    bench: Callable[..., Any], groups: list[Group], plain: Any, share: str
) -> None:
    found = bench(batch={"share_prefix": share}).logprobs(groups)
    with torch.no_grad():
        expected = [masked_logprobs(plain, t).numpy() for group in groups for t in group.trajectories]
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() < 1e-5


def test_at_equal_weights_every_ratio_is_one(
    bench: Callable[..., Any], groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stats = bench().gradient(groups, monkeypatch)
    assert stats.policy.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert stats.policy.log_ratio_max < 1e-4


def test_the_gradient_is_that_of_the_masked_softmax(
    bench: Callable[..., Any], groups: list[Group], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At equal weights the clipped weight is 1: the sum of -A log pi over the kept sets, by autograd in float64."""
    made = bench(algo={"objective": "cispo"})
    found, stats = made.gradient(groups, monkeypatch)
    total = torch.zeros((), dtype=torch.float64)
    batch = stats.batch
    tokens = {
        (int(sequence), int(token)): (float(advantage), float(weight))
        for row in batch.rows
        for sequence, token, advantage, weight in zip(
            row.row.sequence, row.row.token, row.advantage, row.token_weight, strict=True
        )
    }
    for number, trajectory in enumerate(batch.trajectories):
        for place, logp in enumerate(masked_logprobs(plain, trajectory), trajectory.prompt_length):
            advantage, weight = tokens[number, place]
            total = total - advantage * weight * logp
    plain.zero_grad()
    total.backward()
    expected = torch.zeros_like(found, dtype=torch.float64)
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    for spec in made.policy.manifest.tensors:
        gradient = parameters[spec.name].grad
        assert gradient is not None
        expected[spec.offset : spec.offset + spec.size] = gradient.flatten()
    plain.zero_grad()
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 1e-4


def test_trajectories_without_kept_sets_in_the_batch_are_trained_over_the_vocabulary(
    bench: Callable[..., Any], groups: list[Group], groups_of: Callable[..., list[Group]]
) -> None:
    whole = groups_of([[4, 6, 9, 3]], seed=9)
    mixed = [
        groups[0],
        msgspec.structs.replace(whole[0]) if hasattr(whole[0], "__struct_fields__") else whole[0],
    ]
    found = bench().logprobs(mixed)
    alone = bench().logprobs(whole)
    for ours, theirs in zip(found[len(groups[0].trajectories) :], alone, strict=True):
        assert np.abs(ours - theirs).max() < 1e-5


def test_a_row_without_ids_means_every_id() -> None:
    given = KeptRows(torch.tensor([0, 2, 2, 3]), torch.tensor([4, 1, 0]))
    with torch.device("meta"):  # whatever does not follow its inputs' device would be there, and fail
        rows = given.over(5)
    assert rows.offsets.tolist() == [0, 2, 7, 8]
    assert rows.ids.tolist() == [4, 1, 0, 1, 2, 3, 4, 0]


def test_a_table_of_none_has_no_ids(groups_of: Callable[..., list[Group]]) -> None:
    table = KeptTable(groups_of([[2, 3]])[0].trajectories)
    assert table._ids.size == 0
