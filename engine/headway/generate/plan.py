"""Attention plans of the generator: what each token of a ragged step may see in the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headway_kernels.attention import AttentionPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Runs:
    """Runs of consecutive queries, in the order of the step's tokens.

    Attributes (each int64 [R]):
        length: queries of the run.
        causal_start: pool position of the run's own region; causal_base: tokens of it before the run.
        full_start, full_length: one more range that every query sees whole (a member's prompt; length 0: none).
    """

    length: Ints
    causal_start: Ints
    causal_base: Ints
    full_start: Ints
    full_length: Ints

    @staticmethod
    def concatenate(parts: list[Runs]) -> Runs:
        """One after the other."""
        return Runs(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("length", "causal_start", "causal_base", "full_start", "full_length")
            )
        )

    def pool_positions(self) -> Ints:
        """Where each token's key and value go. Shape [N]."""
        first = self.causal_start + self.causal_base
        if (self.length == 1).all():
            return first
        ends = np.cumsum(self.length)
        return np.repeat(first - (ends - self.length), self.length) + np.arange(ends[-1])

    def plan(self, num_keys: int) -> AttentionPlan:
        """The plan over a pool of `num_keys` tokens."""
        has_range = self.full_length > 0
        offsets = np.zeros(len(self.length) + 1, np.int64)
        np.cumsum(has_range, out=offsets[1:])
        num_queries = int(self.length.sum())
        arrays = (
            np.cumsum(self.length) - self.length,
            self.length,
            self.causal_start,
            self.causal_base,
            offsets,
            self.full_start[has_range],
            self.full_length[has_range],
        )
        tensors = [torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)) for array in arrays]
        return AttentionPlan(*tensors, num_queries=num_queries, num_keys=num_keys)
