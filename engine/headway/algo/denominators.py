"""Token weights: the loss mask and one over the denominator in a single factor per token.

The loss of an optimizer step is sum(token_weight x per-token loss), over all rows, micro-batches and ranks:
the totals are counted over the whole step first, so the update does not depend on how it is split.

    tokens      1 / loss tokens of the step                           each token counts the same
    sequences   1 / (sequences of the step x loss tokens of its own)  each sequence counts the same (GRPO)
    constant    1 / (sequences of the step x max_new_tokens)          no length in it (Dr. GRPO)

Loss tokens are counted after staleness masking and before rejection: a token that a correction rejects later
contributes 0 and still counts. Sequences are those with at least one loss token.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from numpy.typing import NDArray


class Denominator(enum.StrEnum):
    """What a step's loss is divided by; see the module's table."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    CONSTANT = "constant"


@dataclasses.dataclass(frozen=True, slots=True)
class StepTotals:
    """Counts over one optimizer step; add them over rows and ranks.

    Attributes:
        num_tokens: loss tokens. num_sequences: sequences with at least one loss token.
    """

    num_tokens: int = 0
    num_sequences: int = 0

    def __add__(self, other: StepTotals) -> StepTotals:
        return StepTotals(self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences)


def count_totals(mask: NDArray[np.bool_], offsets: NDArray[np.int64]) -> StepTotals:
    """Counts the loss tokens and sequences of one row.

    Args:
        mask: bool [T], the loss mask after staleness masking.
        offsets: int64 [S + 1], segment offsets over the T tokens; a segment is one whole sequence.
    """
    counts = _tokens_per_segment(mask, offsets)
    return StepTotals(int(counts.sum()), int((counts > 0).sum()))


def token_weights(
    mask: NDArray[np.bool_],
    offsets: NDArray[np.int64],
    totals: StepTotals,
    *,
    denominator: Denominator | str = Denominator.TOKENS,
    max_new_tokens: int | None = None,
) -> NDArray[np.float64]:
    """The token weights of one row.

    Args:
        mask: bool [T]; offsets: int64 [S + 1]; as in count_totals.
        totals: of the whole optimizer step, all rows and ranks.
        denominator: see the module's table.
        max_new_tokens: the completion budget; needed by "constant".

    Returns:
        float64 [T]; 0 where the mask is False, and everywhere if the step has no loss token.

    Raises:
        ValueError: an unknown denominator, offsets that do not cover the mask, totals smaller than the row's
            own counts, or "constant" without a positive budget.
    """
    denominator = Denominator(denominator)
    counts = _tokens_per_segment(mask, offsets)
    own = StepTotals(int(counts.sum()), int((counts > 0).sum()))
    if totals.num_tokens < own.num_tokens or totals.num_sequences < own.num_sequences:
        raise ValueError(f"totals must cover the whole step, got {totals} for a row that alone has {own}")
    weights = np.zeros(mask.shape, dtype=np.float64)
    if own.num_tokens == 0:
        return weights
    if denominator is Denominator.TOKENS:
        weights[mask] = 1.0 / totals.num_tokens
    elif denominator is Denominator.SEQUENCES:
        per_segment = 1.0 / (totals.num_sequences * np.maximum(counts, 1))
        weights[mask] = np.repeat(per_segment, np.diff(offsets))[mask]
    else:
        if max_new_tokens is None or max_new_tokens <= 0:
            raise ValueError(f"denominator 'constant' needs max_new_tokens above 0, got {max_new_tokens}")
        weights[mask] = 1.0 / (totals.num_sequences * max_new_tokens)
    return weights


def _tokens_per_segment(mask: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    covers = offsets.ndim == 1 and offsets.size > 0 and offsets[0] == 0 and offsets[-1] == mask.size
    if not covers or (np.diff(offsets) < 0).any():
        raise ValueError(f"offsets must rise from 0 to {mask.size}, got {offsets[:8].tolist()}")
    running = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(mask, dtype=np.int64)])
    return np.diff(running[offsets])
