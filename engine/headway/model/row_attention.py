"""Attention over a learner's row, by the back-end that the recipe names; every one of them keeps the segments apart.

A row is a prefix forest (headway.packing.Row). Each back-end says the same in its own terms: an attention plan, a
block mask, or variable-length sequences whose keys are gathered. `choose_attention` refuses a back-end that cannot
run here by name, with the reason and with what can.

Legend: N tokens of the row, M gathered keys, R runs, Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.packing import Row
from headway_kernels.attention import AttentionPlan, run_attention

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""query [N, Hq, D], key and value [N, Hkv, D], the scores' factor -> [N, Hq, D]; differentiable."""

VarlenKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float], Tensor]
"""query [N, Hq, D], key, value [M, Hkv, D], int32 offsets [R + 1] of queries and of keys, their longest lengths, the
scores' factor -> [N, Hq, D]. The last query of a sequence sees all its keys, each query before it one key less."""


class RowAttention(Protocol):
    """A back-end.

    Attributes:
        name: as in learner.attention.
    """

    @property
    def name(self) -> str:
        """As in learner.attention."""
        ...

    def bind(self, row: Row, device: torch.device) -> Attend:
        """The attention of this row, for all its layers."""
        ...


def row_plan(row: Row) -> AttentionPlan:
    """A row's prefix forest as an attention plan of N queries and N keys."""
    arrays = (
        row.query_start, row.query_len, row.causal_start, row.causal_base,
        row.range_offsets, row.range_start, row.range_len,
    )  # fmt: skip
    tensors = [torch.from_numpy(array) for array in arrays]
    return AttentionPlan(*tensors, num_queries=row.num_tokens, num_keys=row.num_tokens)


@dataclass(frozen=True)
class PlanAttention:
    """The attention op that the embedded engine uses too.

    Attributes:
        name: "native", or "sdpa".
        backend: of headway_kernels.attention: "cpu" is the native library, "reference" torch's
            scaled_dot_product_attention under a mask, or run by run where the mask would be large.
    """

    name: str
    backend: Literal["cpu", "reference"]

    def bind(self, row: Row, device: torch.device) -> Attend:
        """See RowAttention."""
        plan = row_plan(row)

        def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            return run_attention(query, key, value, plan, scale=scale, backend=self.backend)

        return attend


def last_reader(row: Row) -> NDArray[np.int64]:
    """int64 [N]: one past the last token that sees each token.

    A forest laid out depth first needs no more than that: token q sees token k if and only if k <= q < last[k].
    """
    last = np.arange(row.num_tokens, dtype=np.int64) + 1
    for run, (start, length) in enumerate(zip(row.query_start, row.query_len, strict=True)):
        end = start + length
        last[start:end] = end
        for number in range(row.range_offsets[run], row.range_offsets[run + 1]):
            first = row.range_start[number]
            span = last[first : first + row.range_len[number]]
            np.maximum(span, end, out=span)
    _check_forest(row, last)
    return last


def _check_forest(row: Row, last: NDArray[np.int64]) -> None:
    """What the rule lets the first token of each run see is as much as its ranges say."""
    starts = row.query_start[row.query_len > 0]
    visible = starts + 1 - np.searchsorted(np.sort(last), starts, side="right")
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(row.range_len)])
    told = (sums[row.range_offsets[1:]] - sums[row.range_offsets[:-1]] + 1)[row.query_len > 0]
    assert np.array_equal(visible, told), "a row is a prefix forest laid out depth first"


@dataclass(frozen=True)
class FlexAttention:
    """torch's FlexAttention under a block mask of the forest.

    Attributes:
        run: flex_attention, compiled where it is to be fast.
    """

    run: Callable[..., Any]
    name: str = "flex"

    def bind(self, row: Row, device: torch.device) -> Attend:
        """See RowAttention."""
        from torch.nn.attention.flex_attention import create_block_mask

        last = torch.from_numpy(last_reader(row)).to(device)

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < last[key])

        mask = create_block_mask(sees, None, None, row.num_tokens, row.num_tokens, device=str(device))

        def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            heads = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
            out = self.run(*heads, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
            return out[0].transpose(0, 1)

        return attend


@dataclass(frozen=True)
class VarlenAttention:
    """A variable-length kernel: each run is a sequence, whose keys are its ancestors' and its own.

    Attributes:
        name: "flash", or "varlen"; kernel: called once a layer.
    """

    name: str
    kernel: VarlenKernel

    def bind(self, row: Row, device: torch.device) -> Attend:
        """See RowAttention."""
        runs = varlen_runs(row)
        keys = None if runs.keys is None else torch.from_numpy(runs.keys).to(device)
        offsets = [torch.from_numpy(array).to(device) for array in (runs.query_offsets, runs.key_offsets)]

        def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            if keys is not None:  # a shared prefix is read once for each run that goes on from it
                key, value = key[keys], value[keys]
            return self.kernel(
                query.contiguous(), key.contiguous(), value.contiguous(), offsets[0], offsets[1],
                runs.longest_query, runs.longest_key, scale,
            )  # fmt: skip

        return attend


@dataclass(frozen=True)
class VarlenRuns:
    """A row as variable-length sequences; runs without tokens are left out.

    Attributes:
        query_offsets, key_offsets: int32 [R + 1], from 0 to N and to M.
        keys: int64 [M], the row's token of each key, ancestors first; None: the row's tokens in order.
        longest_query, longest_key: tokens.
    """

    query_offsets: NDArray[np.int32]
    key_offsets: NDArray[np.int32]
    keys: NDArray[np.int64] | None
    longest_query: int
    longest_key: int


def varlen_runs(row: Row) -> VarlenRuns:
    """See VarlenRuns."""
    pieces: list[NDArray[np.int64]] = []
    query_lengths: list[int] = []
    key_lengths: list[int] = []
    for run, (start, length) in enumerate(zip(row.query_start.tolist(), row.query_len.tolist(), strict=True)):
        if length == 0:
            continue
        ranges = range(row.range_offsets[run], row.range_offsets[run + 1])
        mine = [np.arange(row.range_start[n], row.range_start[n] + row.range_len[n]) for n in ranges]
        mine.append(np.arange(start, start + length))
        pieces.extend(mine)
        query_lengths.append(length)
        key_lengths.append(sum(map(len, mine)))
    return VarlenRuns(
        query_offsets=_offsets(query_lengths),
        key_offsets=_offsets(key_lengths),
        keys=None if query_lengths == key_lengths else np.concatenate(pieces),
        longest_query=max(query_lengths, default=0),
        longest_key=max(key_lengths, default=0),
    )


def _offsets(lengths: list[int]) -> NDArray[np.int32]:
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
