"""A step's loss, gradient and statistics do not depend on how many ranks its sequences are spread over."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from headway.algo import Objective, PolicyStats, StepTotals, count_totals, head_loss_step, token_weights

LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34)
V, H = 19, 8
# Bounds so wide that some sequences, not all, are clipped.
OBJECTIVES = {
    "cispo": Objective("cispo"),
    "grpo": Objective("grpo"),
    "gspo": Objective("gspo", clip_low=0.5, clip_high=2.0),
}
_distributed: Any = dist


class Rank:
    """One rank of a gloo group, on a thread of its own: its sequences, a row each."""

    def __init__(self, store: Any, rank: int, size: int, sequences: list[int]) -> None:
        options = _distributed.ProcessGroupGloo._Options()
        options._devices = [_distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=30)
        self.group = _distributed.ProcessGroupGloo(store, rank, size, options)
        self.sequences = sequences

    def sum(self, tensor: Tensor) -> Tensor:
        self.group.allreduce([tensor]).wait()
        return tensor

    def step(self, denominator: str, name: str) -> tuple[float, Tensor, PolicyStats]:
        """What every rank holds after its collectives."""
        rows = [row_of(index) for index in self.sequences]
        own = sum((count_totals(mask, offsets) for mask, offsets, _ in rows), StepTotals())
        counts = self.sum(torch.tensor([own.num_tokens, own.num_sequences]))
        totals = StepTotals(*counts.tolist())
        loss, stats, gradient = torch.zeros(1, dtype=torch.float64), PolicyStats.zero(), torch.zeros(V, H)
        weight = torch.randn(V, H, generator=torch.Generator().manual_seed(7))
        for mask, offsets, inputs in rows:
            weights = token_weights(mask, offsets, totals, denominator=denominator, max_new_tokens=40)
            result = head_loss_step(
                weight=weight, **inputs, token_weight=torch.from_numpy(weights), segments=torch.from_numpy(offsets),
                objective=OBJECTIVES[name], weight_grad=gradient,
            )  # fmt: skip
            loss, stats = loss + result.loss, stats + result.stats
        peaks = stats.peaks.clone()
        maximum = _distributed.AllreduceOptions()
        maximum.reduceOp = dist.ReduceOp.MAX
        self.group.allreduce([peaks], maximum).wait()
        stats = PolicyStats(self.sum(stats.sums.clone()), peaks, self.sum(stats.buckets.clone()))
        return float(self.sum(loss)), self.sum(gradient), stats


def row_of(index: int) -> tuple[Any, Any, dict[str, Any]]:
    """A sequence's mask, offsets and inputs, which depend on its index alone."""
    generator = torch.Generator().manual_seed(index)
    length = LENGTHS[index]
    noise = torch.randn(4, length, generator=generator)
    mask = noise[0].numpy() > -1
    inputs = {
        "x": torch.randn(length, H, generator=generator), "target": (noise[1].abs() * 7).long() % V,
        "inv_temperature": torch.ones(length), "behaviour": -3 + 0.3 * noise[2],
        "advantage": noise[3, :1].expand(length),
    }  # fmt: skip
    return mask, np.array([0, length]), inputs


def over_ranks(parts: list[list[int]], denominator: str, name: str) -> tuple[float, Tensor, PolicyStats]:
    store, results, faults = dist.HashStore(), [None] * len(parts), []

    def run(rank: int) -> None:
        try:
            results[rank] = Rank(store, rank, len(parts), parts[rank]).step(denominator, name)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert faults == []
    first: Any = results[0]
    for other in results[1:]:
        assert other is not None
        assert other[0] == first[0]
        assert torch.equal(other[1], first[1])
    return first


@pytest.mark.parametrize("denominator", ["tokens", "sequences", "constant"])
@pytest.mark.parametrize("name", ["cispo", "grpo", "gspo"])
def test_loss_gradient_and_statistics_do_not_depend_on_the_number_of_ranks(
    denominator: str, name: str
) -> None:
    """Unequal shares, shuffled, and a rank without any sequence."""
    loss, gradient, stats = over_ranks([list(range(8))], denominator, name)
    assert loss != 0.0
    assert float(gradient.norm()) > 1e-3
    for parts in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[7, 0], [5, 2, 4], [], [6, 1, 3]]):
        other_loss, other, other_stats = over_ranks(parts, denominator, name)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert float((other - gradient).norm()) <= 1e-6 * float(gradient.norm())
        torch.testing.assert_close(other_stats.sums, stats.sums, rtol=1e-6, atol=1e-9)
        assert torch.equal(other_stats.peaks, stats.peaks)
        assert torch.equal(other_stats.buckets, stats.buckets)
