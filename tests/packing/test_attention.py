"""A packed row through the real attention op equals its trajectories one by one, values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headway.packing import PackGroup, Row, pack
from headway.types import FinishReason, PolicyVersion, Trajectory, VersionSpan
from headway_kernels.attention import run_attention
from headway_kernels.attention_plan import AttentionPlan

HEADS, SIZE, VOCABULARY = 2, 8, 12


def trajectory(prompt: list[int], completion: list[int]) -> Trajectory:
    length = len(prompt) + len(completion)
    mask = np.arange(length) >= len(prompt)
    return Trajectory(
        trajectory_id="",
        ticket_id=0,
        member=0,
        prompt_index=0,
        prompt_hash=0,
        prompt_length=len(prompt),
        token_ids=np.array(prompt + completion, np.int32),
        loss_mask=mask,
        logprobs=np.zeros(length, np.float32),
        spans=[VersionSpan(len(prompt), length, PolicyVersion(0, 0))],
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        reward=1.0,
        num_cached=0,
        started_s=0.0,
        finished_s=0.0,
    )


def plan_of(row: Row) -> AttentionPlan:
    arrays = [
        torch.from_numpy(array)
        for array in (
            row.query_start,
            row.query_len,
            row.causal_start,
            row.causal_base,
            row.range_offsets,
            row.range_start,
            row.range_len,
        )
    ]
    return AttentionPlan(*arrays, num_queries=row.num_tokens, num_keys=row.num_tokens)


def batch(seed: int) -> list[PackGroup]:
    """Groups whose completions branch, merge and end at different lengths."""
    rng = np.random.default_rng(seed)
    groups: list[PackGroup] = []
    for group_id in range(4):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 6)).tolist()
        members = [
            trajectory(prompt, rng.integers(0, 2, rng.integers(1, 7)).tolist())
            for _ in range(rng.integers(1, 6))
        ]
        groups.append(PackGroup(group_id, members))
    return groups


class Layer:
    """One attention layer in fp64: a token's query, key and value come from its id and position."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (3, VOCABULARY * 16, HEADS, SIZE)
        self.table = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        self.out = torch.randn(VOCABULARY, HEADS * SIZE, generator=generator, dtype=torch.float64)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan | None) -> torch.Tensor:
        query, key, value = self.table[:, ids * 16 + positions]
        if plan is not None:
            return run_attention(query, key, value, plan, scale=0.5).flatten(1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * 0.5
        scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)

    def logprobs(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.out.T).log_softmax(-1).gather(1, target[:, None])[:, 0]


@pytest.mark.parametrize("share", ["tree", "prompt", "none"])
@pytest.mark.parametrize("tokens_per_row", [12, 1000])
def test_packed_logprobs_and_gradients_equal_one_by_one(share: str, tokens_per_row: int) -> None:
    layer, groups = Layer(), batch(seed=3)
    packing = pack(groups, tokens_per_row, share)
    members = [member for group in groups for member in group.members]
    weight = torch.linspace(-1, 1, len(members), dtype=torch.float64)

    found: dict[tuple[int, int], float] = {}
    packed_loss = torch.zeros((), dtype=torch.float64)
    for row in packing.rows:
        hidden = layer.hidden(
            torch.from_numpy(row.token_ids), torch.from_numpy(row.position_ids), plan_of(row)
        )
        logprobs = layer.logprobs(hidden[row.hidden_index], torch.from_numpy(row.target))
        packed_loss = packed_loss + (weight[row.sequence] * logprobs).sum()
        found |= dict(zip(zip(row.sequence, row.token, strict=True), logprobs.tolist(), strict=True))
    (packed_gradient,) = torch.autograd.grad(packed_loss, layer.table)

    loss = torch.zeros((), dtype=torch.float64)
    for number, member in enumerate(members):
        ids = torch.from_numpy(member.token_ids.astype(np.int64))
        logprobs = layer.logprobs(layer.hidden(ids, torch.arange(len(ids)), None)[:-1], ids[1:])
        loss = loss + weight[number] * logprobs[member.prompt_length - 1 :].sum()
        for token in range(member.prompt_length, len(ids)):
            assert found.pop((number, token)) == pytest.approx(logprobs[token - 1].item(), abs=1e-5)
    assert found == {}
    (gradient,) = torch.autograd.grad(loss, layer.table)
    assert (packed_gradient - gradient).norm() <= 1e-6 * gradient.norm()


def test_changing_a_document_leaves_the_others_bit_identical() -> None:
    layer = Layer()
    documents = [([1, 2], [3, 4, 5]), ([6], [7, 8]), ([9, 9, 9], [1, 1])]
    results: list[list[float]] = []
    for first in (documents[0], ([2, 2], [2, 2, 2])):
        groups = [PackGroup(k, [trajectory(*pair)]) for k, pair in enumerate([first, *documents[1:]])]
        (row,) = pack(groups, 1000).rows
        hidden = layer.hidden(
            torch.from_numpy(row.token_ids), torch.from_numpy(row.position_ids), plan_of(row)
        )
        logprobs = layer.logprobs(hidden[row.hidden_index], torch.from_numpy(row.target))
        results.append(logprobs[torch.from_numpy(row.sequence > 0)].tolist())
    assert results[0] == results[1]
