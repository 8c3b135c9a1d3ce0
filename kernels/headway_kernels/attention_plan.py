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
        _check_disjoint(*arrays)
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
    if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.device.type != "cpu":
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
    _check_bound("query_start", query_start, 0, num_queries, f"{num_queries} queries")
    _check_bound("query_len", query_len, 0, num_queries - query_start, f"{num_queries} queries")
    _check_bound("causal_start", causal_start, 0, num_keys, f"{num_keys} keys")
    room = num_keys - causal_start
    _check_bound("query_len", query_len, 0, room, f"each query sees itself among {num_keys} keys")
    _check_bound("causal_base", causal_base, 0, room - query_len, f"{num_keys} keys")


def _check_ranges(range_offsets: Ints, range_start: Ints, range_len: Ints, *, num_keys: int) -> None:
    if len(range_start) != len(range_len):
        _refuse(f"range_start has {len(range_start)} elements, range_len {len(range_len)}")
    if range_offsets[0] != 0 or range_offsets[-1] != len(range_start) or (np.diff(range_offsets) < 0).any():
        _refuse(f"range_offsets must rise from 0 to {len(range_start)}, the number of full ranges")
    _check_bound("range_start", range_start, 0, num_keys, f"{num_keys} keys")
    _check_bound("range_len", range_len, 0, num_keys - range_start, f"{num_keys} keys")


def _check_disjoint(
    query_start: Ints,
    query_len: Ints,
    causal_start: Ints,
    causal_base: Ints,
    range_offsets: Ints,
    range_start: Ints,
    range_len: Ints,
) -> None:
    """No query in two runs; no key twice in one run."""
    filled = query_len > 0
    starts, ends = query_start[filled], (query_start + query_len)[filled]
    if (np.diff(starts) < 0).any():
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    if (ends[:-1] > starts[1:]).any():
        i = int((ends[:-1] > starts[1:]).argmax())
        _refuse(f"query {int(starts[i + 1])} belongs to two runs")
    if len(range_start) == 0:
        return
    run = np.repeat(np.arange(len(query_len)), np.diff(range_offsets))
    last = causal_base + query_len
    both = (range_start < (causal_start + last)[run]) & (range_start + range_len > causal_start[run])
    both &= filled[run] & (range_len > 0)
    if both.any():
        i = int(both.argmax())
        _refuse(f"full range {i} of run {int(run[i])} overlaps the run's causal range")
    if len(range_start) > 1 and (np.diff(run) == 0).any():
        order = np.lexsort((range_start, run))
        run, begin, end = run[order], range_start[order], (range_start + range_len)[order]
        clash = (run[1:] == run[:-1]) & (begin[1:] < end[:-1])
        if clash.any():
            _refuse(f"two full ranges of run {int(run[int(clash.argmax())])} overlap")
