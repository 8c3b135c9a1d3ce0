"""head_masked in Triton: a program a row gathers the kept rows of the weight and scores the target among them.

Only the kept ids' rows of the weight are read, once: n 2 H bytes a row of bf16. A row's bits do not depend on the
other rows. The sums are fp32; nothing is a matrix product.

Legend: T rows, H hidden, V vocabulary, n kept ids of a row, B of them at a time, D of H at a time.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.head_results import HeadLogp
from headway_kernels.triton.launch import lacks_device, lacks_dtype, on_device
from headway_kernels.triton.numerics import LOWEST_PEAK, LOWEST_SHIFT, exponential, logit

# A sampler's top 20 fill 32; [32, 64] at 4 warps is 16 products a thread, and leaves room for many rows at once.
BLOCK_KEPT = 32
BLOCK_HIDDEN = 64
# For widths whose rows are not aligned: each product has an address of its own.
BLOCK_HIDDEN_RAGGED = 16
NUM_WARPS = 4


@triton.jit
def masked_rows(
    x_ptr, w_ptr, bias_ptr, target_ptr, inv_temperature_ptr, offsets_ptr, ids_ptr, out_ptr, T, H, x_stride, w_stride,
    scale, softcap, HAS_SOFTCAP: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A row a program.

    Args:
        x_ptr: [T, H]; w_ptr: [V, H]; bias_ptr: float [V] or None. offsets_ptr: int64 [T + 1]; ids_ptr: int64 [K].
        out_ptr: fp32 [3, T], written: log-prob, logsumexp, entropy over the row's kept ids.
    """
    row = tl.program_id(0).to(tl.int64)
    low, high = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    target = tl.load(target_ptr + row)
    inv_temperature = tl.load(inv_temperature_ptr + row).to(tl.float32)
    peak = tl.full([B], LOWEST_PEAK, tl.float32)
    total = tl.zeros([B], tl.float32)
    dot = tl.zeros([B], tl.float32)
    picked = tl.full([B], float("-inf"), tl.float32)
    for start in range(0, high - low, B):
        places = low + start + tl.arange(0, B)
        kept = places < high
        ids = tl.load(ids_ptr + places, mask=kept, other=0)
        sums = tl.zeros([B, D], tl.float32)
        for d in range(0, H, D):
            depth = d + tl.arange(0, D)
            x_D = tl.load(x_ptr + row * x_stride + depth, mask=depth < H, other=0.0).to(tl.float32)
            w_BD = tl.load(
                w_ptr + ids[:, None] * w_stride + depth[None, :],
                mask=kept[:, None] & (depth[None, :] < H),
                other=0.0,
            ).to(tl.float32)
            sums += w_BD * x_D[None, :]
        bias = tl.zeros([B], tl.float32)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + ids, mask=kept, other=0.0).to(tl.float32)
        z = logit(tl.sum(sums, 1), bias, scale, softcap, inv_temperature, HAS_SOFTCAP)
        z = tl.where(kept, z, float("-inf"))
        picked = tl.where(kept & (ids == target), z, picked)
        higher = tl.maximum(peak, z)
        faded = tl.maximum(peak - higher, LOWEST_SHIFT)
        fade = tl.exp(faded)
        e, shift = exponential(z, higher)
        dot = fade * (dot + faded * total) + e * shift
        total = fade * total + e
        peak = higher
    highest = tl.max(peak, 0)
    faded = tl.maximum(peak - highest, LOWEST_SHIFT)
    fade = tl.exp(faded)
    dots = tl.sum(fade * (dot + faded * total), 0)
    mass = tl.sum(fade * total, 0)
    log_mass = tl.log(mass)
    tl.store(out_ptr + row, tl.max(picked, 0) - highest - log_mass)
    tl.store(out_ptr + T + row, highest + log_mass)
    tl.store(out_ptr + 2 * tl.cast(T, tl.int64) + row, log_mass - dots / mass)


def lacks(arguments: Mapping[str, Any]) -> str | None:
    """What the kernel lacks for a call of head_masked."""
    floats = (torch.bfloat16, torch.float16, torch.float32)
    reason = lacks_device(arguments) or lacks_dtype(
        arguments, ("x", "weight", "bias", "inv_temperature"), floats
    )
    if reason is None and not (arguments["x"].stride(-1) == arguments["weight"].stride(-1) == 1):
        reason = "the rows of x and weight must be contiguous"
    return reason


def triton_head_masked(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    offsets: Tensor,
    ids: Tensor,
    *,
    inv_temperature: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float | None,
    chunk_bytes: int,
) -> HeadLogp:
    """head_masked, whose arguments these are, checked; chunk_bytes has no use, since nothing gathered is held.

    A row whose ids lack its target has a log-prob of -inf; one without ids, of NaN.
    """
    num_rows = x.shape[0]
    out = torch.empty(3, num_rows, device=x.device)
    block_hidden = BLOCK_HIDDEN_RAGGED if x.shape[1] % 16 else BLOCK_HIDDEN
    if num_rows:
        with on_device(x):
            masked_rows[(num_rows,)](
                x, weight, None if bias is None else bias.contiguous(), target.contiguous(),
                inv_temperature.contiguous(), offsets.contiguous(), ids.contiguous(), out, num_rows, x.shape[1],
                x.stride(0), weight.stride(0), 1.0 if logit_scale is None else logit_scale,
                1.0 if softcap is None else softcap, HAS_SOFTCAP=softcap is not None, B=BLOCK_KEPT, D=block_hidden,
                num_warps=NUM_WARPS,
            )  # fmt: skip
    return HeadLogp(out[0], out[1], out[2])
