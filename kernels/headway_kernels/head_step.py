"""The loop of head_loss_step, whatever computes the rows: spans of rows, scores, the policy loss, the gradients.

A back-end brings a Chunk (its logits or what takes their place) and, if it has one, its own policy loss; this module
decides which rows are together: even spans; for segment-level objectives unions of whole segments; for m2po
without a limit all rows. What outgrows a chunk is scored piece by piece first, then scored again for its gradients.

Legend: T rows (loss tokens), H hidden, V vocabulary, S segments.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from headway_kernels.objective import Objective
from headway_kernels.policy_loss import PolicyLoss, check_segments
from headway_kernels.policy_stats import PolicyStats


@dataclasses.dataclass(frozen=True, slots=True)
class RowScores:
    """Per row, in the compute dtype: log-prob of the target, logsumexp, and entropy where wanted."""

    logp: Tensor
    logsumexp: Tensor
    entropy: Tensor | None

    @staticmethod
    def empty(num_rows: int, dtype: torch.dtype, device: torch.device, *, with_entropy: bool) -> RowScores:
        """Room for the scores of `num_rows` rows."""
        # Apart, not views of one tensor: they leave as outputs of a custom op.
        logp, logsumexp, entropy = (torch.zeros(num_rows, dtype=dtype, device=device) for _ in range(3))
        return RowScores(logp, logsumexp, entropy if with_entropy else None)

    def rows(self, start: int, end: int) -> RowScores:
        """Views of the rows [start, end)."""
        entropy = None if self.entropy is None else self.entropy[start:end]
        return RowScores(self.logp[start:end], self.logsumexp[start:end], entropy)


@dataclasses.dataclass(frozen=True, slots=True)
class Gradients:
    """Where the gradients go.

    Attributes:
        x: [T, H] zeros, written on the rows that take part.
        weight: [V, H] in the compute dtype, added to; None: not computed. bias: [V], likewise.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None


class Chunk(Protocol):
    """The rows of one step, of which it can hold some at a time."""

    def pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """The rows [start, end) as consecutive spans that it can hold; at least one row each."""
        ...

    def score(self, start: int, end: int, out: RowScores) -> None:
        """Writes the scores of the rows [start, end) to `out` (of these rows) and holds them."""
        ...

    def accumulate(self, coefficient: Tensor, entropy_weight: Tensor | None, out: Gradients) -> None:
        """Adds the gradients of the rows that it holds, and lets go of them.

        Rows whose coefficient and entropy weight are 0 take no part in any product, so a value in them that
        is not finite reaches nothing.

        Args:
            coefficient: [N], dL/dlogp. entropy_weight: [N], minus dL/dentropy; None: no entropy term.
            out: the gradients of the whole step.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyRows:
    """The policy loss of row ranges of one step; the tensors are policy_loss's, of all rows."""

    behaviour: Tensor
    advantage: Tensor
    token_weight: Tensor
    segments: Tensor | None
    objective: Objective
    reference: Tensor | None
    proximal: Tensor | None
    m2_limit: Tensor | None
    function: Callable[..., PolicyLoss]

    def evaluate(self, scores: RowScores, start: int, end: int, boundaries: list[int]) -> PolicyLoss:
        """The loss of the rows [start, end); `boundaries` are the segments' offsets, if they are read."""
        segments = None
        if self.segments is not None and self.objective.is_segment_level:
            first, last = bisect.bisect_left(boundaries, start), bisect.bisect_right(boundaries, end)
            segments = self.segments[first:last] - start
        part = scores.rows(start, end)
        return self.function(
            logp=part.logp,
            behaviour=self.behaviour[start:end],
            advantage=self.advantage[start:end],
            token_weight=self.token_weight[start:end],
            objective=self.objective,
            segments=segments,
            reference=None if self.reference is None else self.reference[start:end],
            proximal=None if self.proximal is None else self.proximal[start:end],
            entropy=part.entropy,
            m2_limit=self.m2_limit,
            first_index=start,
        )


def run_step(
    chunk: Chunk, policy: PolicyRows, scores: RowScores, gradients: Gradients
) -> tuple[Tensor, PolicyStats]:
    """Every row's scores and gradients; returns the loss, a float64 scalar, and the statistics."""
    num_rows, device = scores.logp.shape[0], scores.logp.device
    loss, stats = torch.zeros((), dtype=torch.float64, device=device), PolicyStats.zero(device)
    boundaries: list[int] = []
    if policy.objective.is_segment_level:
        assert policy.segments is not None
        boundaries = check_segments(policy.segments, num_rows)
    for start, end in _spans(chunk, policy, boundaries, num_rows):
        pieces = chunk.pieces(start, end)
        for low, high in pieces:
            chunk.score(low, high, scores.rows(low, high))
        result = policy.evaluate(scores, start, end, boundaries)
        for low, high in pieces:
            if len(pieces) > 1:  # the rows outgrew the chunk: they are computed a second time
                chunk.score(low, high, scores.rows(low, high))
            coefficient = result.coefficient[low - start : high - start]
            chunk.accumulate(coefficient, _entropy_weight(policy, low, high), gradients)
        loss, stats = loss + result.loss, stats + result.stats
    return loss, stats


def _entropy_weight(policy: PolicyRows, start: int, end: int) -> Tensor | None:
    entropy_coef = policy.objective.entropy_coef
    return policy.token_weight[start:end].to(torch.float64) * entropy_coef if entropy_coef else None


def _spans(
    chunk: Chunk, policy: PolicyRows, boundaries: list[int], num_rows: int
) -> Iterator[tuple[int, int]]:
    """The rows that are evaluated together."""
    if num_rows == 0:
        return iter(())
    if policy.objective.needs_m2_limit and policy.m2_limit is None:
        return iter([(0, num_rows)])
    if policy.objective.is_segment_level:
        return _segment_spans(chunk, boundaries)
    return iter(chunk.pieces(0, num_rows))


def _segment_spans(chunk: Chunk, boundaries: list[int]) -> Iterator[tuple[int, int]]:
    """Unions of whole segments that fit the chunk; a segment that does not is a span of its own."""
    start, end = 0, 0
    for border in boundaries[1:]:
        if end > start and len(chunk.pieces(start, border)) > 1:
            yield start, end
            start = end
        end = border
    if end > start:
        yield start, end


def even_pieces(start: int, end: int, limit: int) -> list[tuple[int, int]]:
    """Splits [start, end) into the fewest spans of at most `limit` rows, as even as they come."""
    rows = end - start
    count = -(-rows // limit)
    return [(start + i * rows // count, start + (i + 1) * rows // count) for i in range(count)]
