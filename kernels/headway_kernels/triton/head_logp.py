"""head_logp in Triton: the product with the weight streams over the vocabulary, no logit reaches memory.

A program owns a tile of rows and a span of columns; it keeps the running maximum and sums of its rows and writes four
floats a row and span. A second kernel merges a row's spans. Tiles, spans and the order of every sum depend on H and V
alone, so a row's bits do not depend on which rows are beside it.

Products of fp32 run in fp32 (input_precision "ieee"), those of bf16 and fp16 are exact before they are summed in fp32.

Legend: T rows, M rows of a tile, V vocabulary, N columns of a tile, H hidden, K of it at a time, S spans.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headway_kernels.head_results import HeadLogp
from headway_kernels.head_shard import VocabShard
from headway_kernels.triton.launch import architecture, lacks_device, lacks_dtype, on_device
from headway_kernels.triton.numerics import LOWEST_PEAK, LOWEST_SHIFT, exponential, logit


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How the product is cut; fixed by dtype, width, softcap and GPU, because a row's bits depend on it.

    Attributes:
        rows, columns, depth: of a tile. tiles: of columns in a span. num_warps, num_stages: of the kernel.
    """

    rows: int
    columns: int
    depth: int
    tiles: int
    num_warps: int
    num_stages: int


HALF = Tiling(rows=128, columns=128, depth=64, tiles=8, num_warps=8, num_stages=3)
# Where a tile of 128 x 128 needs more registers than there are: with a softcap's arithmetic, and before sm_90, whose
# products read shared memory themselves.
HALF_NARROW = dataclasses.replace(HALF, columns=64, tiles=16)
# For widths whose rows are not aligned: each value has an address of its own.
HALF_RAGGED = dataclasses.replace(HALF_NARROW, depth=32)
# fp32 has no tensor cores without rounding to TF32: its tiles live in registers.
SINGLE = Tiling(rows=64, columns=64, depth=16, tiles=16, num_warps=8, num_stages=2)
# Triton compiles apart what is a multiple of this.
KNOWN_MULTIPLE = 16
# Tiles of rows that share the spans at hand while they are in the cache.
GROUP = 16
MERGE_ROWS = 8
MERGE_WARPS = 4


@triton.jit
def _tile(x, w, row, column, T, V, H, x_stride, w_stride, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
          DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """x[row : row + M] w[column : column + N]^T, fp32 [M, N]; rows and columns beyond the end are 0."""
    product = tl.zeros([M, N], tl.float32)
    if DESCRIPTORS:
        for k in range(0, H, K):
            product = tl.dot(x.load([row, k]), w.load([column, k]).T, product, input_precision=PRECISION)
    else:
        rows = row + tl.arange(0, M)
        columns = column + tl.arange(0, N)
        x_ptr = x + rows.to(tl.int64)[:, None] * x_stride
        w_ptr = w + columns.to(tl.int64)[None, :] * w_stride
        for k in range(0, H, K):
            depth = k + tl.arange(0, K)
            x_MK = tl.load(x_ptr + depth[None, :], mask=(rows[:, None] < T) & (depth[None, :] < H), other=0.0)
            w_KN = tl.load(
                w_ptr + depth[:, None], mask=(columns[None, :] < V) & (depth[:, None] < H), other=0.0
            )
            product = tl.dot(x_MK, w_KN, product, input_precision=PRECISION)
    return product


@triton.jit
def logp_spans(
    x, w, bias_ptr, target_ptr, inv_temperature_ptr, parts_ptr, T, V, H, x_stride, w_stride, scale, softcap,
    first_column, HAS_SOFTCAP: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of rows and a span of columns a program.

    Args:
        x: [T, H], w: [V, H]: tensor descriptors of tiles [M, K] and [N, K], or pointers with row strides.
        bias_ptr: float [V] or None. target_ptr: int64 [T]. inv_temperature_ptr: float [T].
        first_column: id of w's first row. parts_ptr: fp32 [4, S, T], written: largest logit, sum of exp(z - it), sum
            of exp(z - it)(z - it), the target's logit (-inf outside the span).
    """
    num_row_tiles = tl.cdiv(T, M)
    num_spans = tl.cdiv(V, N * TILES)
    pid = tl.program_id(0)
    group = pid // (GROUP * num_spans)
    group_size = min(num_row_tiles - group * GROUP, GROUP)
    row = (group * GROUP + pid % (GROUP * num_spans) % group_size) * M
    span = pid % (GROUP * num_spans) // group_size
    rows = row + tl.arange(0, M)
    inside = rows < T
    target = tl.load(target_ptr + rows, mask=inside, other=-1) - first_column
    inv_temperature = tl.load(inv_temperature_ptr + rows, mask=inside, other=1.0).to(tl.float32)
    peak = tl.full([M], LOWEST_PEAK, tl.float32)
    total = tl.zeros([M], tl.float32)
    dot = tl.zeros([M], tl.float32)
    picked = tl.full([M], float("-inf"), tl.float32)
    for tile in range(TILES):
        column = (span * TILES + tile) * N
        if column < V:
            product = _tile(x, w, row, column, T, V, H, x_stride, w_stride, M, N, K, DESCRIPTORS, PRECISION)
            columns = column + tl.arange(0, N)
            bias = tl.zeros([N], tl.float32)
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)
            z = logit(product, bias[None, :], scale, softcap, inv_temperature[:, None], HAS_SOFTCAP)
            z = tl.where(columns[None, :] < V, z, float("-inf"))
            hit = columns[None, :] == target[:, None]
            found = tl.sum(tl.where(hit, z, 0.0), 1)
            picked = tl.where((target >= column) & (target < column + N) & (target < V), found, picked)
            higher = tl.maximum(peak, tl.max(z, 1))
            faded = tl.maximum(peak - higher, LOWEST_SHIFT)
            fade = tl.exp(faded)
            e, shift = exponential(z, higher[:, None])
            dot = fade * (dot + faded * total) + tl.sum(e * shift, 1)
            total = fade * total + tl.sum(e, 1)
            peak = higher
    plane = tl.cast(num_spans, tl.int64) * T
    out_ptr = parts_ptr + span.to(tl.int64) * T + rows
    tl.store(out_ptr, peak, mask=inside)
    tl.store(out_ptr + plane, total, mask=inside)
    tl.store(out_ptr + 2 * plane, dot, mask=inside)
    tl.store(out_ptr + 3 * plane, picked, mask=inside)


@triton.jit
def logp_merge(
    parts_ptr, out_ptr, T, num_spans, ROWS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Merges the spans of ROWS rows a program, in a fixed tree.

    Args:
        parts_ptr: as logp_spans writes it. out_ptr: fp32 [4, T], written: peak, sums over the whole vocabulary at
            hand, and the target's logit. SPANS: a power of two of at least num_spans.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    spans = tl.arange(0, SPANS)
    plane = tl.cast(num_spans, tl.int64) * T
    inside = (rows[:, None] < T) & (spans[None, :] < num_spans)
    in_ptr = parts_ptr + spans.to(tl.int64)[None, :] * T + rows[:, None]
    peak = tl.load(in_ptr, mask=inside, other=LOWEST_PEAK)
    total = tl.load(in_ptr + plane, mask=inside, other=0.0)
    dot = tl.load(in_ptr + 2 * plane, mask=inside, other=0.0)
    picked = tl.load(in_ptr + 3 * plane, mask=inside, other=float("-inf"))
    highest = tl.max(peak, 1)
    shift = tl.maximum(peak - highest[:, None], LOWEST_SHIFT)
    fade = tl.exp(shift)
    tl.store(out_ptr + rows, highest, mask=rows < T)
    tl.store(out_ptr + T + rows, tl.sum(fade * total, 1), mask=rows < T)
    tl.store(
        out_ptr + 2 * tl.cast(T, tl.int64) + rows, tl.sum(fade * (dot + shift * total), 1), mask=rows < T
    )
    # A sum would be -inf: at most one span has the target. A NaN logit has made the total one.
    tl.store(out_ptr + 3 * tl.cast(T, tl.int64) + rows, tl.max(picked, 1), mask=rows < T)


def lacks(arguments: Mapping[str, Any]) -> str | None:
    """What the kernels lack for a call of head_logp."""
    floats = (torch.bfloat16, torch.float16, torch.float32)
    reason = lacks_device(arguments) or lacks_dtype(
        arguments, ("x", "weight", "bias", "inv_temperature"), floats
    )
    if reason is None and not (arguments["x"].stride(-1) == arguments["weight"].stride(-1) == 1):
        reason = "the rows of x and weight must be contiguous"
    return reason


def triton_head_logp(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    inv_temperature: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float | None,
    shard: VocabShard | None,
    chunk_bytes: int,
) -> HeadLogp:
    """head_logp, whose arguments these are, checked; chunk_bytes has no use, since no logits are held."""
    num_rows, (vocabulary, hidden) = x.shape[0], weight.shape
    tiling = tiling_of(x.dtype, hidden, architecture(), has_softcap=softcap is not None)
    num_spans = triton.cdiv(vocabulary, tiling.columns * tiling.tiles)
    merged = torch.empty(4, num_rows, device=x.device)
    if num_rows:
        parts = torch.empty(4, num_spans, num_rows, device=x.device)
        descriptors = takes_descriptors(x) and takes_descriptors(weight)
        sides = (x, weight)
        if descriptors:
            sides = tuple(
                TensorDescriptor.from_tensor(side.detach(), [size, tiling.depth])
                for side, size in ((x, tiling.rows), (weight, tiling.columns))
            )
        with on_device(x):
            logp_spans[(triton.cdiv(num_rows, tiling.rows) * num_spans,)](
                *sides, None if bias is None else bias.contiguous(), target.contiguous(), inv_temperature.contiguous(),
                parts, num_rows, vocabulary, hidden, x.stride(0), weight.stride(0),
                1.0 if logit_scale is None else logit_scale, 1.0 if softcap is None else softcap,
                0 if shard is None else shard.start, HAS_SOFTCAP=softcap is not None, DESCRIPTORS=descriptors,
                PRECISION="ieee", M=tiling.rows, N=tiling.columns, K=tiling.depth, TILES=tiling.tiles, GROUP=GROUP,
                num_warps=tiling.num_warps, num_stages=tiling.num_stages,
            )  # fmt: skip
            logp_merge[(triton.cdiv(num_rows, MERGE_ROWS),)](
                parts, merged, num_rows, num_spans, ROWS=MERGE_ROWS, SPANS=triton.next_power_of_2(num_spans),
                num_warps=MERGE_WARPS,
            )  # fmt: skip
    return finish_scores(merged, shard)


def tiling_of(dtype: torch.dtype, hidden: int, architecture: int, *, has_softcap: bool) -> Tiling:
    """How the product of a dtype and a width is cut."""
    if dtype is torch.float32:
        return SINGLE
    if hidden % KNOWN_MULTIPLE:
        return HALF_RAGGED
    return HALF_NARROW if has_softcap or architecture < 90 else HALF


def takes_descriptors(side: Tensor) -> bool:
    """The tensor's base and rows are aligned to the 16 bytes that a tensor descriptor needs."""
    row_bytes = side.stride(0) * side.element_size()
    return row_bytes > 0 and row_bytes % 16 == 0 and side.data_ptr() % 16 == 0


def finish_scores(merged: Tensor, shard: VocabShard | None) -> HeadLogp:
    """Scores from each row's merged sums, elementwise in fp64, so that no row depends on another.

    Args:
        merged: fp32 [4, T], as logp_merge writes it.
    """
    peak, sums, dots, picked = merged.unbind(0)
    total, dot = sums.double(), dots.double()
    if shard is not None:
        whole = shard.merge(peak, total, dot, picked)
        peak, total, dot, picked = whole.peak, whole.sums, whole.dots, whole.picked
    log_total = total.log()
    logp = (picked - peak).double() - log_total
    return HeadLogp(logp.float(), (log_total + peak).float(), (log_total - dot / total).float())
