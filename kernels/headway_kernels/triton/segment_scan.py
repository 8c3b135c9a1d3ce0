"""segment_scan in Triton: a program a segment walks its tokens from the last block to the first.

y_i = b_i + f_i y_{i+1} is the composition of affine maps, which is associative; a token that is not active is the
identity map, so the scan is carried through it. The values of the next active token travel in a second scan. Both
run in fp64: 24 bytes a token leave the arithmetic free.

Legend: T tokens, S segments, B tokens of a block.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.policy_loss import check_segments
from headway_kernels.segment_scan import ScanKind, SegmentScan
from headway_kernels.triton.launch import lacks_device, lacks_dtype, on_device
from headway_kernels.triton.numerics import MAX_EXPONENT

BLOCK = 512
NUM_WARPS = 4

_RETURN = tl.constexpr("return")
_GAE = tl.constexpr("gae")


@triton.jit
def _compose(later_gain, later_factor, gain, factor):
    """The map of the tokens `later` inside the map of the tokens before them."""
    return gain + factor * later_gain, factor * later_factor


@triton.jit
def _nearest(later_value, later_known, value, known):
    """The value of the first active token: of those before, else of those after."""
    return tl.where(known != 0, value, later_value), known | later_known


@triton.jit
def _next(values, tail, B: tl.constexpr):
    """Each place's right neighbour; `tail` at the last."""
    place = tl.arange(0, B)
    moved = tl.gather(values, tl.where(place == B - 1, place, place + 1), 0)
    return tl.where(place == B - 1, tail, moved)


@triton.jit
def _joined(upper, lower):
    return tl.full([], upper, tl.float64) + tl.full([], lower, tl.float64)


@triton.jit
def _load(pointer, offsets, use):
    if pointer is not None:
        return tl.load(pointer + offsets, mask=use, other=0.0).to(tl.float64)
    else:
        return tl.zeros(offsets.shape, tl.float64)


@triton.jit
def scan_segments(
    rewards_ptr, values_ptr, log_ratio_ptr, mask_ptr, bootstrap_ptr, segments_ptr, advantage_ptr, target_ptr,
    factors, KIND: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A segment a program.

    Args:
        rewards_ptr: float [T]; values_ptr, log_ratio_ptr: float [T] or None; mask_ptr: int8 [T] or None;
            bootstrap_ptr: float [S] or None; segments_ptr: int64 [S + 1].
        advantage_ptr, target_ptr: [T], written; 0 where not active.
        factors: gamma, lam, rho_cap, c_cap, each as two fp32 that add up to it; see _split.
    """
    segment = tl.program_id(0)
    low, high = tl.load(segments_ptr + segment), tl.load(segments_ptr + segment + 1)
    after = tl.zeros([], tl.float64)
    if bootstrap_ptr is not None:
        after = tl.load(bootstrap_ptr + segment).to(tl.float64)
    gamma, lam = _joined(factors[0], factors[1]), _joined(factors[2], factors[3])
    rho_cap, c_cap = _joined(factors[4], factors[5]), _joined(factors[6], factors[7])
    # What the tokens after the block hand over: the scan's y, the next active token's value and its target.
    carry = after if KIND == _RETURN else tl.zeros([], tl.float64)
    next_value, next_target = after, after
    for i in range(tl.cdiv(high - low, B)):
        offsets = high - (i + 1) * B + tl.arange(0, B)
        inside = offsets >= low
        active = inside
        if mask_ptr is not None:
            active = tl.load(mask_ptr + offsets, mask=inside, other=0) != 0
        reward, value = _load(rewards_ptr, offsets, active), _load(values_ptr, offsets, active)
        # The next active token's value, of each token.
        known, any_known = tl.associative_scan((value, active.to(tl.int32)), 0, _nearest, reverse=True)
        own_or_next = tl.where(any_known != 0, known, next_value)
        following = _next(own_or_next, next_value, B)
        gain, factor = reward, tl.where(active, gamma, 1.0)
        if KIND != _RETURN:
            gain = reward + gamma * following - value
            factor = tl.where(active, gamma * lam, 1.0)
            if KIND != _GAE:
                d = _load(log_ratio_ptr, offsets, active)
                d = tl.where(d > MAX_EXPONENT, MAX_EXPONENT, tl.where(d < -MAX_EXPONENT, -MAX_EXPONENT, d))
                ratio = tl.exp(d)
                gain = tl.where(ratio > rho_cap, rho_cap, ratio) * gain
                factor = tl.where(active, factor * tl.where(ratio > c_cap, c_cap, ratio), 1.0)
        gain = tl.where(active, gain, 0.0)
        total, reach = tl.associative_scan((gain, factor), 0, _compose, reverse=True)
        y = total + reach * carry
        if KIND == _RETURN:
            target, advantage = y, y - value
        elif KIND == _GAE:
            target, advantage = y + value, y
        else:
            # Between active tokens y is the next active token's, and so is the value beside it.
            target = own_or_next + y
            advantage = reward + gamma * _next(target, next_target, B) - value
            next_target = tl.sum(tl.where(tl.arange(0, B) == 0, target, 0.0), 0)
        dtype = advantage_ptr.dtype.element_ty
        tl.store(advantage_ptr + offsets, tl.where(active, advantage, 0.0).to(dtype), mask=inside)
        tl.store(target_ptr + offsets, tl.where(active, target, 0.0).to(dtype), mask=inside)
        carry = tl.sum(tl.where(tl.arange(0, B) == 0, y, 0.0), 0)
        next_value = tl.sum(tl.where(tl.arange(0, B) == 0, own_or_next, 0.0), 0)


def _split(*factors: float) -> tuple[float, ...]:
    """Each factor as two fp32 that add up to it: a kernel takes no fp64 scalar, and gamma^n keeps no error small."""
    parts: list[float] = []
    for factor in factors:
        upper = struct.unpack("f", struct.pack("f", factor))[0]
        parts += [upper, factor - upper]
    return tuple(parts)


def lacks(arguments: Mapping[str, Any]) -> str | None:
    """What the kernel lacks for a call of segment_scan."""
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    names = ("rewards", "values", "log_ratio", "bootstrap")
    return lacks_device(arguments) or lacks_dtype(arguments, names, floats)


def triton_segment_scan(
    kind: ScanKind,
    rewards: Tensor,
    segments: Tensor,
    *,
    values: Tensor | None,
    log_ratio: Tensor | None,
    mask: Tensor | None,
    bootstrap: Tensor | None,
    gamma: float,
    lam: float,
    rho_cap: float,
    c_cap: float,
) -> SegmentScan:
    """segment_scan, whose arguments these are, checked. A value that is not finite makes the outputs of its segment
    up to it NaN; offsets on a GPU are the caller's to keep."""
    num_tokens, dtype = rewards.shape[0], torch.promote_types(rewards.dtype, torch.float32)
    if segments.device.type == "cpu":
        check_segments(segments, num_tokens)
    # Not zeros: a token that no segment covers must not pass for one that is not active.
    out = torch.full((2, num_tokens), torch.nan, dtype=dtype, device=rewards.device)
    num_segments = segments.shape[0] - 1
    if num_segments and num_tokens:
        columns = (rewards, values, log_ratio, None if mask is None else mask.view(torch.int8), bootstrap)
        tokens = (None if column is None else column.detach().contiguous() for column in columns)
        with on_device(rewards):
            scan_segments[(num_segments,)](
                *tokens, segments.contiguous(), out[0], out[1], _split(gamma, lam, rho_cap, c_cap), KIND=kind, B=BLOCK,
                num_warps=NUM_WARPS,
            )  # fmt: skip
    return SegmentScan(out[0], out[1])
