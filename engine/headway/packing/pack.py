"""Packing: the groups of a batch -> rows of at most tokens_per_row tokens, common prefixes forwarded once.

Called by the trainer before each optimizer step. The result depends on the groups only, not on the order in
which they arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from headway.errors import ShapeError
from headway.packing.forest import FlatBatch, SharedOrder, build_row, shared_order
from headway.packing.row import Ints, PackGroup, Packing, TokenSequence

Share = Literal["auto", "tree", "prompt", "none"]

# "auto" takes the tree only when it forwards at least this much less than shared prompts: it cuts completions
# into many short runs, which attention pays for.
TREE_SAVES = 0.10


def pack(groups: Sequence[PackGroup], tokens_per_row: int, share: Share = "auto") -> Packing:
    """Pack a batch.

    Everything goes into one row if it fits. Otherwise groups are placed first-fit, the largest first; a group
    that exceeds a row is split and repeats its prefix in each. Within a row prefixes are shared across groups
    too.

    Args:
        groups: of the batch, any order; ids are unique.
        tokens_per_row: most tokens of a row.
        share: "prompt": a common prompt is forwarded once; "tree": every common prefix, so that equal
        completions
            are forwarded once; "none"; "auto": "tree" where it forwards >= 10 % less than "prompt".

    Returns:
        The rows; trajectories are numbered by group id, then member.

    Raises:
        ShapeError: a trajectory does not fit a row (drop it before, see `too_long`).
    """
    groups = sorted(groups, key=lambda group: group.group_id)
    long = too_long(groups, tokens_per_row)
    if long:
        raise ShapeError(
            f"trajectories (group, member) {long[:8]} need more than tokens_per_row = {tokens_per_row} "
            "tokens; raise it, or drop them as row_too_short before packing"
        )
    batch = FlatBatch.of(groups)
    everything = np.flatnonzero(batch.forwarded > 0)
    resolved, limits, whole = _resolve(batch, everything, share)
    if whole.num_tokens <= tokens_per_row:
        rows = [build_row(batch, whole)] if len(everything) else []
    else:
        parts = _first_fit(_pieces(batch, everything, limits, tokens_per_row), tokens_per_row)
        rows = [build_row(batch, shared_order(batch, part, limits)) for part in parts]
    return Packing(
        rows=rows,
        sequences=[(group.group_id, place) for group in groups for place in range(len(group.members))],
        num_forwarded=sum(row.num_tokens for row in rows),
        num_unshared=int(batch.forwarded.sum()),
        share=resolved,
    )


def too_long(groups: Sequence[PackGroup], tokens_per_row: int) -> list[tuple[int, int]]:
    """(group_id, place among its members) of every trajectory that no row can hold."""
    return [
        (group.group_id, place)
        for group in groups
        for place, member in enumerate(group.members)
        if len(member.token_ids) > tokens_per_row and num_forwarded(member) > tokens_per_row
    ]


def num_forwarded(member: TokenSequence) -> int:
    """Tokens of one trajectory that must be forwarded: those before its last loss token."""
    loss = np.flatnonzero(member.loss_mask)
    return int(loss[-1]) if len(loss) else 0


def _resolve(batch: FlatBatch, sequences: Ints, share: Share) -> tuple[str, Ints, SharedOrder]:
    """The sharing in force, how many tokens of each sequence it may share, the forest of the whole batch."""
    if share == "none":
        limits = np.zeros(batch.num_sequences, np.int64)
        return "none", limits, shared_order(batch, sequences, limits)
    tree = prompt = None
    if share != "prompt":
        tree = shared_order(batch, sequences, batch.forwarded)
    if share != "tree":
        prompt = shared_order(batch, sequences, batch.prompt)
    if tree is not None and (prompt is None or tree.num_tokens <= (1 - TREE_SAVES) * prompt.num_tokens):
        return "tree", batch.forwarded, tree
    assert prompt is not None
    return "prompt", batch.prompt, prompt


def _pieces(batch: FlatBatch, sequences: Ints, limits: Ints, tokens_per_row: int) -> list[tuple[int, Ints]]:
    """The batch as (tokens, sequences): one piece per group, more for a group that exceeds a row."""
    order = shared_order(batch, sequences, limits, by_group=True)
    pieces: list[tuple[int, Ints]] = []
    begin, num_tokens = 0, 0
    group = batch.group[order.sequences].tolist()
    added, alone = order.added.tolist(), batch.forwarded[order.sequences].tolist()
    for k in range(len(group)):
        if k > begin and (group[k] != group[begin] or num_tokens + added[k] > tokens_per_row):
            pieces.append((num_tokens, order.sequences[begin:k]))
            begin, num_tokens = k, 0
        num_tokens += alone[k] if k == begin else added[k]
    pieces.append((num_tokens, order.sequences[begin:]))
    return pieces


def _first_fit(pieces: list[tuple[int, Ints]], tokens_per_row: int) -> list[Ints]:
    """Sequences of each row, ascending. Pieces of equal size keep the order of their groups."""
    rows: list[list[Ints]] = []
    free: list[int] = []
    for num_tokens, sequences in sorted(pieces, key=lambda piece: -piece[0]):
        row = next((k for k, left in enumerate(free) if left >= num_tokens), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(tokens_per_row)
        rows[row].append(sequences)
        free[row] -= num_tokens
    return [np.sort(np.concatenate(parts)) for parts in rows]
