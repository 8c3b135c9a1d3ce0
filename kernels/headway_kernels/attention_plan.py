"""Which keys each query sees: the one description that decoding, prefill and training share.

Comes in: int64 arrays made by the generator (key-value pool slots) or by the packer (prefix trees). Goes out:
an AttentionPlan, checked once, used by every layer of a forward and backward. See attention.run_attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray

from headway_kernels.errors import ShapeError
from headway_kernels.native import PlanStruct

_ARRAYS = (
    "query_start",
    "query_len",
    "causal_start",
    "causal_base",
    "range_offsets",
    "range_start",
    "range_len",
)
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Runs of consecutive queries and the keys they see; refuses what does not fit when it is made.

    A run r is `query_len[r]` queries from `query_start[r]`. Its query j (0-based) sees every key of the run's
    full ranges, and keys `causal_start[r] .. causal_start[r] + causal_base[r] + j`, that last one included. A
    decode step is a run of one query whose causal range is its own slots and whose full range may be a shared
    prompt; a prefill is a run without full ranges; a node of a prefix tree is a run whose full ranges are its
    ancestors.

    Queries belong to at most one run; those of none get zeros. Runs may be empty. The keys of one run are
    disjoint. The arrays must not be changed afterwards.

    Args:
        query_start, query_len, causal_start, causal_base: [R] int64, CPU, contiguous.
        range_offsets: [R + 1] int64; run r has the full ranges range_offsets[r] .. range_offsets[r + 1] - 1.
        range_start, range_len: [number of full ranges] int64.
        num_queries: N, the number of query tokens.
        num_keys: M, the number of key tokens (of the pool, or of the row).

    Raises:
        ShapeError: a wrong dtype, length, order or bound, with the place and the value.
    """

    query_start: torch.Tensor
    query_len: torch.Tensor
    causal_start: torch.Tensor
    causal_base: torch.Tensor
    range_offsets: torch.Tensor
    range_start: torch.Tensor
    range_len: torch.Tensor
    num_queries: int
    num_keys: int
    covers_all: bool = field(init=False, repr=False)  # every query belongs to a run
    struct: PlanStruct = field(init=False, repr=False)  # what the native library reads
    memo: dict[str, torch.Tensor] = field(init=False, repr=False, default_factory=dict)  # of the reference

    def __post_init__(self) -> None:
        arrays = [_as_numpy(name, getattr(self, name)) for name in _ARRAYS]
        num_runs = len(arrays[0])
        for name, array in zip(_ARRAYS[1:5], arrays[1:5], strict=True):
            expected = num_runs + 1 if name == "range_offsets" else num_runs
            if len(array) != expected:
                _refuse(f"{name} has {len(array)} elements, expected {expected} for {num_runs} runs")
        _check_runs(*arrays[:4], num_queries=self.num_queries, num_keys=self.num_keys)
        _check_ranges(*arrays[4:], num_keys=self.num_keys)
        _check_queries_disjoint(arrays[0], arrays[1])
        _check_keys_disjoint(arrays[2], arrays[2] + arrays[3] + arrays[1], *arrays[4:])
        object.__setattr__(self, "covers_all", int(arrays[1].sum()) == self.num_queries)
        pointers = [cast(torch.Tensor, getattr(self, name)).data_ptr() for name in _ARRAYS]
        object.__setattr__(self, "struct", PlanStruct(*pointers, num_runs, self.num_queries, self.num_keys))

    @classmethod
    def build(
        cls,
        runs: Sequence[tuple[int, int, int, int, Sequence[tuple[int, int]]]],
        *,
        num_queries: int,
        num_keys: int,
    ) -> AttentionPlan:
        """A plan from one tuple a run.

        Args:
            runs: (query_start, query_len, causal_start, causal_base, [(range_start, range_len), ...]) each.
            num_queries: N.
            num_keys: M.

        Raises:
            ShapeError: as the class.
        """
        columns = torch.tensor([run[:4] for run in runs], dtype=torch.int64).reshape(-1, 4)
        first, length, start, base = (columns[:, i].contiguous() for i in range(4))
        counts = torch.tensor([0] + [len(run[4]) for run in runs], dtype=torch.int64)
        ranges = torch.tensor([pair for run in runs for pair in run[4]], dtype=torch.int64).reshape(-1, 2)
        return cls(
            query_start=first,
            query_len=length,
            causal_start=start,
            causal_base=base,
            range_offsets=counts.cumsum(0),
            range_start=ranges[:, 0].contiguous(),
            range_len=ranges[:, 1].contiguous(),
            num_queries=num_queries,
            num_keys=num_keys,
        )


def _refuse(what: str) -> NoReturn:
    raise ShapeError(f"attention plan: {what}")


def _as_numpy(name: str, tensor: torch.Tensor) -> Ints:
    if tensor.dtype is not torch.int64 or tensor.dim() != 1 or not tensor.is_cpu:
        _refuse(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, "
            "expected a 1-D torch.int64 CPU tensor"
        )
    if not tensor.is_contiguous():
        _refuse(f"{name} is not contiguous; call .contiguous() on it")
    return tensor.numpy()


def _check_bound(name: str, values: Ints, low: int, high: Ints | int, meaning: str) -> None:
    """Refuses values outside low .. high; written so that no sum can overflow."""
    bad = (values < low) | (values > high)
    if bad.any():
        i = int(bad.argmax())
        limit = high if isinstance(high, int) else int(high[i])
        _refuse(f"{name}[{i}] is {int(values[i])}, expected {low} .. {limit} ({meaning})")


def _check_runs(
    query_start: Ints,
    query_len: Ints,
    causal_start: Ints,
    causal_base: Ints,
    *,
    num_queries: int,
    num_keys: int,
) -> None:
    if num_queries < 0 or num_keys < 0:
        _refuse(f"num_queries {num_queries} and num_keys {num_keys} must not be negative")
    after, room = num_queries - query_start, num_keys - causal_start
    # One pass for the usual case, a plan that fits: the sign bit of a union is set if any part is negative.
    signs = query_start | query_len | after | (after - query_len) | causal_start | causal_base | room
    signs |= (room - query_len) | (room - query_len - causal_base)
    if len(signs) == 0 or int(signs.min()) >= 0:
        return
    _check_bound("query_start", query_start, 0, num_queries, f"{num_queries} queries")
    _check_bound("query_len", query_len, 0, after, f"{num_queries} queries")
    _check_bound("causal_start", causal_start, 0, num_keys, f"{num_keys} keys")
    _check_bound("query_len", query_len, 0, room, f"each query sees itself among {num_keys} keys")
    _check_bound("causal_base", causal_base, 0, room - query_len, f"{num_keys} keys")


def _check_ranges(range_offsets: Ints, range_start: Ints, range_len: Ints, *, num_keys: int) -> None:
    if len(range_start) != len(range_len):
        _refuse(f"range_start has {len(range_start)} elements, range_len {len(range_len)}")
    falls = (range_offsets[1:] < range_offsets[:-1]).any()
    if range_offsets[0] != 0 or range_offsets[-1] != len(range_start) or falls:
        _refuse(f"range_offsets must rise from 0 to {len(range_start)}, the number of full ranges")
    after = num_keys - range_start
    signs = range_start | range_len | after | (after - range_len)
    if len(signs) == 0 or int(signs.min()) >= 0:
        return
    _check_bound("range_start", range_start, 0, num_keys, f"{num_keys} keys")
    _check_bound("range_len", range_len, 0, after, f"{num_keys} keys")


def _check_queries_disjoint(query_start: Ints, query_len: Ints) -> None:
    """No query in two runs."""
    ends = query_start + query_len
    if not (ends[:-1] > query_start[1:]).any():
        return  # in order, as both callers make them
    filled = np.flatnonzero(query_len > 0)
    order = filled[np.argsort(query_start[filled], kind="stable")]
    starts, ends = query_start[order], ends[order]
    clash = ends[:-1] > starts[1:]
    if clash.any():
        _refuse(f"query {int(starts[int(clash.argmax()) + 1])} belongs to two runs")


def _check_keys_disjoint(
    causal_start: Ints, causal_end: Ints, range_offsets: Ints, range_start: Ints, range_len: Ints
) -> None:
    """No key twice in one run; empty ranges hold none."""
    if len(range_start) == 0:
        return
    counts = range_offsets[1:] - range_offsets[:-1]
    run = np.repeat(np.arange(len(counts)), counts)
    range_end = range_start + range_len
    both = (range_start < causal_end[run]) & (range_end > causal_start[run]) & (range_len > 0)
    if both.any():
        i = int(both.argmax())
        _refuse(f"full range {i} of run {int(run[i])} overlaps the run's causal range")
    if int(counts.max()) <= 1:
        return
    some = np.flatnonzero(range_len > 0)
    order = some[np.lexsort((range_start[some], run[some]))]
    run, begin, end = run[order], range_start[order], range_end[order]
    clash = (run[1:] == run[:-1]) & (begin[1:] < end[:-1])
    if clash.any():
        _refuse(f"two full ranges of run {int(run[int(clash.argmax())])} overlap")
