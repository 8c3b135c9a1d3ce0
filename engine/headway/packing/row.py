"""Rows: packed trajectories, with common prefixes once, as the arrays that a forward pass needs.

Legend: N tokens of the row, R runs, T loss tokens of the row's trajectories (head rows), Q trajectories in
the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class TokenSequence(Protocol):
    """What packing reads of a trajectory (headway.types.Trajectory is one)."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt first. Shape [L]."""
        ...

    @property
    def prompt_length(self) -> int:
        """Tokens of token_ids that are the prompt."""
        ...

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """True where a token carries loss; position 0 never does. Shape [L]."""
        ...


@dataclass(frozen=True)
class PackGroup:
    """One group of a batch.

    Attributes:
        group_id: its ticket's id; batches are ordered by it.
        members: its trajectories, in member order.
    """

    group_id: int
    members: Sequence[TokenSequence]


@dataclass(frozen=True)
class Row:
    """One forward pass.

    A row is a prefix forest laid out depth first. Run r is a stretch of consecutive tokens; its tokens see
    the run itself causally and every token of its ranges, which are exactly the trajectory's earlier tokens.

    Attributes (int64):
        token_ids, position_ids: [N]; position = place in the trajectory.
        query_start, query_len: [R], the run's tokens; they cover [0, N) in order.
        causal_start: [R] = query_start; causal_base: [R] zeros (see headway_kernels.attention).
        range_offsets: [R + 1] into range_start and range_len: keys that all of the run sees.
        hidden_index: [T], row position whose hidden state predicts the token; a shared one feeds several.
        target: [T], the token.
        sequence: [T], its trajectory's number in the batch; ascending.
        token: [T], its position in that trajectory, to look up log-probs and masks; ascending per trajectory.
        segment_sequence: [Q], trajectories with loss tokens, ascending.
        segment_offsets: [Q + 1] into the head rows: trajectory q has rows [offsets[q], offsets[q + 1]).
    """

    token_ids: Ints
    position_ids: Ints
    query_start: Ints
    query_len: Ints
    causal_start: Ints
    causal_base: Ints
    range_offsets: Ints
    range_start: Ints
    range_len: Ints
    hidden_index: Ints
    target: Ints
    sequence: Ints
    token: Ints
    segment_sequence: Ints
    segment_offsets: Ints

    @property
    def num_tokens(self) -> int:
        """N: tokens to forward."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """T: head rows."""
        return len(self.target)

    @staticmethod
    def empty() -> Row:
        """A row of nothing, for a rank without work."""
        none, zero = np.zeros(0, np.int64), np.zeros(1, np.int64)
        return Row(
            token_ids=none,
            position_ids=none,
            query_start=none,
            query_len=none,
            causal_start=none,
            causal_base=none,
            range_offsets=zero,
            range_start=none,
            range_len=none,
            hidden_index=none,
            target=none,
            sequence=none,
            token=none,
            segment_sequence=none,
            segment_offsets=zero,
        )


@dataclass(frozen=True)
class Packing:
    """A packed batch.

    Attributes:
        rows: at most tokens_per_row tokens each; every trajectory with loss tokens lies in exactly one.
        sequences: (group_id, place among the group's members) of each trajectory, by its number in the batch.
        num_forwarded: tokens of all rows; num_unshared: what it would be without sharing.
        share: "none" | "prompt" | "tree", resolved.
    """

    rows: list[Row]
    sequences: list[tuple[int, int]]
    num_forwarded: int
    num_unshared: int
    share: str
