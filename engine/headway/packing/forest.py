"""Prefix forests: which tokens of a batch are common prefixes, and a row laid out from some of its sequences.

Sequences sorted by their tokens have their common prefixes side by side: the forest is the sorted order plus
the length that each sequence shares with the one before it. In a row each sequence adds only the tokens
beyond that length, as one run; the rest of its path lies in earlier runs.

Legend: S sequences of the batch, each forwarded up to the token before its last loss token (what follows
predicts nothing); L tokens of all sequences together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.packing.row import Ints, PackGroup, Row


@dataclass(frozen=True)
class FlatBatch:
    """All sequences of a batch end to end, by number.

    Attributes:
        token_ids: int64 [L]; offsets: [S + 1].
        forwarded: [S], tokens to forward (0 without loss tokens); prompt: [S], of those the prompt's.
        group: [S], index of the group.
        loss_index: positions in token_ids that carry loss; loss_offsets: [S + 1], where each sequence's
        begin. ordered_bytes: token_ids as big-endian bytes, whose order is that of the tokens.
    """

    token_ids: Ints
    offsets: Ints
    forwarded: Ints
    prompt: Ints
    group: Ints
    loss_index: Ints
    loss_offsets: Ints
    ordered_bytes: bytes

    @staticmethod
    def of(groups: Sequence[PackGroup]) -> FlatBatch:
        """Lay out the groups' members in the given order."""
        members = [member for group in groups for member in group.members]
        lengths = np.array([len(member.token_ids) for member in members], np.int64)
        offsets = _offsets(lengths)
        token_ids = np.concatenate([member.token_ids for member in members] or [np.zeros(0, np.int32)])
        loss = np.concatenate([member.loss_mask for member in members] or [np.zeros(0, np.bool_)])
        if len(loss) != len(token_ids):
            raise AssertionError(f"{len(loss)} loss mask entries for {len(token_ids)} tokens")
        loss[offsets[:-1][lengths > 0]] = False  # nothing predicts a first token
        loss_index = np.flatnonzero(loss).astype(np.int64)
        loss_sequence = np.repeat(np.arange(len(members)), lengths)[loss_index]
        forwarded = np.zeros(len(members), np.int64)
        forwarded[loss_sequence] = (
            loss_index - offsets[loss_sequence]
        )  # ascending, so the last loss token stays
        prompt = np.array([member.prompt_length for member in members], np.int64)
        return FlatBatch(
            token_ids=token_ids.astype(np.int64),
            offsets=offsets,
            forwarded=forwarded,
            prompt=np.minimum(prompt, forwarded),
            group=np.repeat(np.arange(len(groups)), [len(group.members) for group in groups]),
            loss_index=loss_index,
            loss_offsets=_offsets(np.bincount(loss_sequence, minlength=len(members))),
            ordered_bytes=token_ids.astype(">i4").tobytes(),
        )

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.forwarded)


@dataclass(frozen=True)
class SharedOrder:
    """Sequences in forest order, with what each shares.

    Attributes:
        sequences: numbers in the batch; shared: tokens in common with the one before (0 for the first).
        added: tokens that each adds to a row.
    """

    sequences: Ints
    shared: Ints
    added: Ints

    @property
    def num_tokens(self) -> int:
        """Tokens of the forest."""
        return int(self.added.sum())


def shared_order(batch: FlatBatch, sequences: Ints, limits: Ints, by_group: bool = False) -> SharedOrder:
    """Sort sequences by their first `limits` tokens and measure their common prefixes.

    Args:
        sequences: numbers to sort, ascending; equal ones stay in this order.
        limits: [S], how many tokens of each sequence may be shared.
        by_group: sort by group first and share nothing across groups.
    """
    begin = batch.offsets[sequences]
    bounds = zip((4 * begin).tolist(), (4 * (begin + limits[sequences])).tolist(), strict=True)
    keys = [batch.ordered_bytes[a:b] for a, b in bounds]
    ordered = sequences[np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)]
    if by_group:
        ordered = ordered[np.argsort(batch.group[ordered], kind="stable")]
    shared = np.zeros(len(ordered), np.int64)
    if len(ordered) > 1:
        before, after = ordered[:-1], ordered[1:]
        most = np.minimum(limits[before], limits[after])
        if by_group:
            most[batch.group[before] != batch.group[after]] = 0
        shared[1:] = _common_prefixes(batch, before, after, most)
    return SharedOrder(ordered, shared, batch.forwarded[ordered] - shared)


def build_row(batch: FlatBatch, order: SharedOrder) -> Row:
    """Lay the forest of these sequences out as one row."""
    num_tokens = order.num_tokens
    starts = _offsets(order.added)[:-1]
    begin = batch.offsets[order.sequences]
    positions = np.arange(num_tokens) + np.repeat(order.shared - starts, order.added)
    source = positions + np.repeat(begin, order.added)
    range_offsets, range_start, range_len = _ancestor_ranges(order, starts)
    has_run = order.added > 0
    query_start = starts[has_run]

    place = np.empty(len(batch.token_ids), np.int64)  # row position of every token of these sequences
    place[source] = np.arange(num_tokens)
    pairs = zip(begin[:-1].tolist(), begin[1:].tolist(), order.shared[1:].tolist(), strict=True)
    for before, after, shared in pairs:
        if shared:
            place[after : after + shared] = place[before : before + shared]

    segment_sequence = np.sort(order.sequences)
    counts = np.diff(batch.loss_offsets)[segment_sequence]
    segment_offsets = _offsets(counts)
    sequence = np.repeat(segment_sequence, counts)
    first = np.repeat(batch.loss_offsets[segment_sequence] - segment_offsets[:-1], counts)
    loss_index = batch.loss_index[first + np.arange(len(first))]
    return Row(
        token_ids=batch.token_ids[source],
        position_ids=positions,
        query_start=query_start,
        query_len=order.added[has_run],
        causal_start=query_start,
        causal_base=np.zeros(len(query_start), np.int64),
        range_offsets=range_offsets,
        range_start=range_start,
        range_len=range_len,
        hidden_index=place[loss_index - 1],
        target=batch.token_ids[loss_index],
        sequence=sequence,
        token=loss_index - batch.offsets[sequence],
        segment_sequence=segment_sequence,
        segment_offsets=segment_offsets,
    )


def _common_prefixes(batch: FlatBatch, before: Ints, after: Ints, most: Ints) -> Ints:
    """Length of the common prefix of each pair of sequences, at most `most`."""
    pair = np.repeat(np.arange(len(most)), most)
    local = np.arange(len(pair)) - np.repeat(_offsets(most)[:-1], most)
    differs = (
        batch.token_ids[batch.offsets[before][pair] + local]
        != batch.token_ids[batch.offsets[after][pair] + local]
    )
    found = np.flatnonzero(differs)
    pair_found = pair[found]
    first = np.ones(len(found), np.bool_)
    first[1:] = pair_found[1:] != pair_found[:-1]
    shared = most.copy()
    shared[pair_found[first]] = local[found[first]]
    return shared


def _ancestor_ranges(order: SharedOrder, starts: Ints) -> tuple[Ints, Ints, Ints]:
    """Per run, the row positions of the path before it, as merged ranges: offsets [R + 1], start, length."""
    offsets, range_start, range_len = [0], [], []
    path: list[
        tuple[int, int]
    ] = []  # runs on the current path: (first position in the sequence, row position)
    rows = zip(order.shared.tolist(), starts.tolist(), order.added.tolist(), strict=True)
    for shared, start, added in rows:
        while path and path[-1][0] >= shared:
            path.pop()
        if not added:
            continue
        end = -1
        for k, (position, row_start) in enumerate(path):
            length = (path[k + 1][0] if k + 1 < len(path) else shared) - position
            if row_start == end:
                range_len[-1] += length
            else:
                range_start.append(row_start)
                range_len.append(length)
            end = row_start + length
        path.append((shared, start))
        offsets.append(len(range_start))
    return np.array(offsets, np.int64), np.array(range_start, np.int64), np.array(range_len, np.int64)


def _offsets(counts: NDArray[np.int64]) -> Ints:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
