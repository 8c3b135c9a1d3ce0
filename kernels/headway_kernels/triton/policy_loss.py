"""policy_loss in Triton: one program a block of tokens, or one a segment where ratios are formed over segments.

Statistics: each program writes its fp32 sums, peaks and bucket counts to its own row of a buffer; the rows are added
in fp64, in their order. No atomics, no host sync.

Legend: T tokens, S segments, P programs, K statistics.
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

from headway_kernels.objective import Correction, Level, Objective
from headway_kernels.policy_loss import PolicyLoss, check_segments
from headway_kernels.policy_reference import second_moment_limit
from headway_kernels.policy_stats import (
    BUCKET_LOW,
    BUCKETS_PER_UNIT,
    NUM_BUCKETS,
    NUM_INNER,
    SUMS,
    PolicyStats,
)
from headway_kernels.triton.launch import bounds_of, codes_of, lacks_device, lacks_dtype, on_device
from headway_kernels.triton.numerics import bounded, bounded_exp, exp_excess
from headway_kernels.triton.policy_token import all_finite, anchored, k3_token, kl_token, policy_token

BLOCK = 128
NUM_WARPS = 4
# Said aloud, because ptxas aims at 64 on its own and spills.
SEGMENT_REGISTERS = 128
# Powers of two that hold the sums and the buckets.
NUM_SUMS, NUM_PEAKS, NUM_COUNTS = 32, 4, 256
PER_TOKEN = ("logp", "behaviour", "advantage", "token_weight", "reference", "proximal", "entropy")

_BUCKET_LOW = tl.constexpr(BUCKET_LOW)
_BUCKETS_PER_UNIT = tl.constexpr(BUCKETS_PER_UNIT)
_NUM_INNER = tl.constexpr(float(NUM_INNER))
_NUM_SUMS = tl.constexpr(NUM_SUMS)
_NUM_COUNTS = tl.constexpr(NUM_COUNTS)
_NUM_PEAKS = tl.constexpr(NUM_PEAKS)
_NO_CORRECTION = tl.constexpr(int(Correction.NONE))
_TOKEN_LEVEL = tl.constexpr(int(Level.TOKEN))
_GEOMETRIC = tl.constexpr(int(Level.GEOMETRIC))


@triton.jit
def _load_or_zero(pointer, offsets, inside):
    if pointer is not None:
        return tl.load(pointer + offsets, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros(offsets.shape, tl.float32)


@triton.jit
def _load_tokens(tokens, offsets, inside):
    """A block of tokens: weight, advantage, pi, mu, proximal, ref, entropy, all 0 but where weighted and finite;
    then which are weighted, and which of them are finite."""
    pi, mu = _load_or_zero(tokens[0], offsets, inside), _load_or_zero(tokens[1], offsets, inside)
    advantage, weight = _load_or_zero(tokens[2], offsets, inside), _load_or_zero(tokens[3], offsets, inside)
    ref, proximal = _load_or_zero(tokens[4], offsets, inside), _load_or_zero(tokens[5], offsets, inside)
    entropy = _load_or_zero(tokens[6], offsets, inside)
    active = weight != 0
    use = active & all_finite(weight, advantage, pi, mu, proximal, ref, entropy)
    weight, advantage = tl.where(use, weight, 0.0), tl.where(use, advantage, 0.0)
    pi, mu = tl.where(use, pi, 0.0), tl.where(use, mu, 0.0)
    proximal, ref = tl.where(use, proximal, 0.0), tl.where(use, ref, 0.0)
    return weight, advantage, pi, mu, proximal, ref, tl.where(use, entropy, 0.0), active, use


@triton.jit
def _put(sums, position: tl.constexpr, values):
    """`sums` with the sum of `values` in a place."""
    return tl.where(tl.arange(0, _NUM_SUMS) == position, tl.sum(values.to(tl.float32), 0), sums)


@triton.jit
def _block_sums(
    loss, weight_ratio, high, low, dual, capped, rejected, pi, mu, ref, entropy, cap, active, use,
    HAS_REFERENCE: tl.constexpr,
):  # fmt: skip
    """The block's sums in the order of policy_stats.SUMS from "weighted" on; place 0 holds the loss."""
    d = pi - mu
    r = bounded_exp(d)
    clamped = tl.minimum(r, cap)
    limited = high | low | dual | capped | rejected
    sums = tl.zeros([_NUM_SUMS], tl.float32)
    sums = _put(sums, 0, loss)
    sums = _put(sums, 1, active)
    sums = _put(sums, 2, use & high)
    sums = _put(sums, 3, use & low)
    sums = _put(sums, 4, use & dual)
    sums = _put(sums, 5, use & capped)
    sums = _put(sums, 6, use & rejected)
    sums = _put(sums, 7, use & limited)
    sums = _put(sums, 8, tl.where(use, r, 0.0))
    sums = _put(sums, 9, tl.where(use, r * r, 0.0))
    sums = _put(sums, 10, tl.where(use, clamped, 0.0))
    sums = _put(sums, 11, tl.where(use, clamped * clamped, 0.0))
    sums = _put(sums, 12, tl.where(use, weight_ratio, 0.0))
    # d is 0 where a token is not used.
    exponent = bounded(d)
    sums = _put(sums, 13, -d)
    sums = _put(sums, 14, d * d * 0.5)
    sums = _put(sums, 15, exp_excess(exponent) + (exponent - d))
    if HAS_REFERENCE:
        excess = pi - ref
        k3, _ = k3_token(excess)
        sums = _put(sums, 16, clamped * excess)
        sums = _put(sums, 17, clamped * excess * excess * 0.5)
        sums = _put(sums, 18, clamped * k3)
    sums = _put(sums, 19, entropy)
    return _put(sums, 23, active & (use == 0))


@triton.jit
def _block_peaks(pi, mu, cap, use):
    """The block's largest log-ratio, its largest magnitude, and the largest clamped ratio."""
    d = pi - mu
    highest = tl.max(tl.where(use, d, float("-inf")), 0)
    clamped = tl.minimum(bounded_exp(d), cap)
    return highest, tl.max(tl.abs(d), 0), tl.max(tl.where(use, clamped, 0.0), 0)


@triton.jit
def _block_counts(pi, mu, use):
    """How many used tokens of the block are in each bucket of the log-ratio, int32 [NUM_COUNTS]."""
    place = tl.floor((pi - mu - _BUCKET_LOW) * _BUCKETS_PER_UNIT)
    place = tl.minimum(tl.maximum(place, -1.0), _NUM_INNER).to(tl.int32) + 1
    place = tl.where(use, place, _NUM_COUNTS)
    return tl.sum((place[:, None] == tl.arange(0, _NUM_COUNTS)[None, :]).to(tl.int32), 0)


@triton.jit
def _store_statistics(sums, highest, magnitude, clamped, counts, statistics, program):
    sums_ptr, peaks_ptr, counts_ptr = statistics[0], statistics[1], statistics[2]
    program = program.to(tl.int64)
    tl.store(sums_ptr + program * _NUM_SUMS + tl.arange(0, _NUM_SUMS), sums)
    tl.store(peaks_ptr + program * _NUM_PEAKS, highest)
    tl.store(peaks_ptr + program * _NUM_PEAKS + 1, magnitude)
    tl.store(peaks_ptr + program * _NUM_PEAKS + 2, clamped)
    tl.store(counts_ptr + program * _NUM_COUNTS + tl.arange(0, _NUM_COUNTS), counts)


@triton.jit
def policy_tokens(
    tokens, m2_limit_ptr, coefficient_ptr, statistics, num_tokens, bounds,
    FAMILY: tl.constexpr, CORRECTION: tl.constexpr, DUAL_CLIP: tl.constexpr, KL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Token-level objectives: a program a block of tokens.

    Args:
        tokens: pointers to pi, mu, advantage, weight, ref, proximal, entropy, the last three None if missing.
        m2_limit_ptr: to a float scalar; None: not read. coefficient_ptr: fp32 [T].
        statistics: pointers to sums fp32 [P, NUM_SUMS], peaks fp32 [P, NUM_PEAKS], counts int32 [P, NUM_COUNTS].
    """
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_tokens
    weight, advantage, pi, mu, proximal, ref, entropy, active, use = _load_tokens(tokens, offsets, inside)
    limit = 0.0
    if m2_limit_ptr is not None:
        limit = tl.load(m2_limit_ptr).to(tl.float32)
    log_q, log_rho = anchored(pi, mu, proximal, CORRECTION, tokens[5] is not None)
    value, slope, ratio, high, low, dual, capped, rejected = policy_token(
        advantage, pi, mu, log_q, log_rho, limit, bounds, FAMILY, CORRECTION, DUAL_CLIP
    )
    kl_value, kl_slope = kl_token(pi, mu, ref, bounds[3], bounds[9], KL)
    missing = tl.where(active & (use == 0), float("nan"), 0.0)
    tl.store(coefficient_ptr + offsets, weight * (slope + kl_slope) + missing, mask=inside)
    loss = weight * (value + kl_value - bounds[10] * entropy) + missing
    sums = _block_sums(
        loss, ratio, high, low, dual, capped, rejected, pi, mu, ref, entropy, bounds[3], active, use,
        tokens[4] is not None,
    )  # fmt: skip
    highest, magnitude, clamped = _block_peaks(pi, mu, bounds[3], use)
    _store_statistics(sums, highest, magnitude, clamped, _block_counts(pi, mu, use), statistics, program)


@triton.jit
def _segment_value(tokens, low, high, CORRECTION: tl.constexpr, BLOCK: tl.constexpr, MEAN: tl.constexpr):
    """Sum or mean over a segment's weighted tokens of pi - mu (of anchor - mu with a correction), in fp64; and
    how many they are."""
    total = tl.zeros([BLOCK], tl.float64)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, high - low, BLOCK):
        offsets = low + start + tl.arange(0, BLOCK)
        _, _, pi, mu, proximal, _, _, active, _ = _load_tokens(tokens, offsets, offsets < high)
        anchor = pi
        if CORRECTION != _NO_CORRECTION and tokens[5] is not None:
            anchor = proximal
        total += anchor.to(tl.float64) - mu.to(tl.float64)
        count += active.to(tl.float32)
    members = tl.sum(count, 0)
    over = tl.sum(total, 0)
    if MEAN:
        over = over / tl.maximum(members, 1.0)
    return over.to(tl.float32), members


@triton.jit
def policy_segments(
    tokens, segments_ptr, m2_limit_ptr, coefficient_ptr, statistics, bounds,
    FAMILY: tl.constexpr, CORRECTION: tl.constexpr, DUAL_CLIP: tl.constexpr, KL: tl.constexpr,
    RATIO_LEVEL: tl.constexpr, RHO_LEVEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Segment-level objectives: a program a segment, which it passes three or four times.

    Args:
        segments_ptr: int64 [S + 1]. The rest: as in policy_tokens, P = S.
    """
    program = tl.program_id(0)
    low, high = tl.load(segments_ptr + program), tl.load(segments_ptr + program + 1)
    over, members = _segment_value(
        tokens, low, high, CORRECTION, BLOCK, (RATIO_LEVEL == _GEOMETRIC) or (RHO_LEVEL == _GEOMETRIC)
    )
    sums = tl.zeros([_NUM_SUMS], tl.float32)
    counts = tl.zeros([_NUM_COUNTS], tl.int32)
    highest, magnitude, clamped = float("-inf"), 0.0, 0.0
    slopes = tl.zeros([BLOCK], tl.float32)
    for start in range(0, high - low, BLOCK):
        offsets = low + start + tl.arange(0, BLOCK)
        inside = offsets < high
        weight, advantage, pi, mu, proximal, ref, entropy, active, use = _load_tokens(tokens, offsets, inside)
        log_q, log_rho = anchored(pi, mu, proximal, CORRECTION, tokens[5] is not None)
        if RATIO_LEVEL != _TOKEN_LEVEL:
            log_q = tl.where(active, over, 0.0)
        if RHO_LEVEL != _TOKEN_LEVEL:
            log_rho = tl.where(active, over, 0.0)
        value, slope, ratio, above, below, dual, capped, rejected = policy_token(
            advantage, pi, mu, log_q, log_rho, 0.0, bounds, FAMILY, CORRECTION, DUAL_CLIP
        )
        kl_value, kl_slope = kl_token(pi, mu, ref, bounds[3], bounds[9], KL)
        missing = tl.where(active & (use == 0), float("nan"), 0.0)
        coefficient = weight * kl_slope + missing
        if RATIO_LEVEL == _GEOMETRIC:
            slopes += weight * slope
        else:
            coefficient += weight * slope
        tl.store(coefficient_ptr + offsets, coefficient, mask=inside)
        loss = weight * (value + kl_value - bounds[10] * entropy) + missing
        sums += _block_sums(
            loss, ratio, above, below, dual, capped, rejected, pi, mu, ref, entropy, bounds[3], active, use,
            tokens[4] is not None,
        )  # fmt: skip
        block_highest, block_magnitude, block_clamped = _block_peaks(pi, mu, bounds[3], use)
        highest = tl.maximum(highest, block_highest)
        magnitude, clamped = tl.maximum(magnitude, block_magnitude), tl.maximum(clamped, block_clamped)
    # A pass of its own: the counts and the sums together need more registers than there are on sm_80.
    for start in range(0, high - low, BLOCK):
        offsets = low + start + tl.arange(0, BLOCK)
        _, _, pi, mu, _, _, _, _, use = _load_tokens(tokens, offsets, offsets < high)
        counts += _block_counts(pi, mu, use)
    if RATIO_LEVEL == _GEOMETRIC:
        # d mean(d)/d logp_t = 1/len for every t of the segment, whichever token the loss term belongs to.
        mean = tl.sum(slopes, 0) / tl.maximum(members, 1.0)
        tl.debug_barrier()
        for start in range(0, high - low, BLOCK):
            offsets = low + start + tl.arange(0, BLOCK)
            inside = offsets < high
            active = tl.load(tokens[3] + offsets, mask=inside, other=0.0).to(tl.float32) != 0
            coefficient = tl.load(coefficient_ptr + offsets, mask=inside, other=0.0)
            tl.store(coefficient_ptr + offsets, coefficient + tl.where(active, mean, 0.0), mask=inside)
    _store_statistics(sums, highest, magnitude, clamped, counts, statistics, program)


@dataclasses.dataclass(frozen=True, slots=True)
class _Partials:
    """What each of P programs wrote."""

    sums: Tensor
    peaks: Tensor
    counts: Tensor

    @staticmethod
    def empty(num_programs: int, device: torch.device) -> _Partials:
        """Room for P programs."""
        return _Partials(
            torch.empty(num_programs, NUM_SUMS, device=device),
            torch.empty(num_programs, NUM_PEAKS, device=device),
            torch.empty(num_programs, NUM_COUNTS, dtype=torch.int32, device=device),
        )

    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """As the kernels take them."""
        return self.sums, self.peaks, self.counts

    def finish(self, num_tokens: int, segment_level: bool) -> tuple[Tensor, PolicyStats]:
        """The loss and the statistics, added in fp64 in the programs' order."""
        by_program = self.sums.to(torch.float64)
        sums = by_program.sum(0)[: len(SUMS)]
        loss = sums[0].clone()
        sums[0] = num_tokens
        if segment_level:
            sums[20] = (by_program[:, 1] > 0).sum()
            sums[21] = (by_program[:, 7] > 0).sum()
            sums[22] = (by_program[:, 6] > 0).sum()
        peaks = self.peaks[:, :3].amax(0).to(torch.float64)
        return loss, PolicyStats(sums, peaks, self.counts.sum(0)[:NUM_BUCKETS].to(torch.float64))


def lacks(arguments: Mapping[str, Any]) -> str | None:
    """What the kernels lack for a call of policy_loss."""
    floats = (torch.float32, torch.bfloat16, torch.float16)
    return lacks_device(arguments) or lacks_dtype(arguments, PER_TOKEN, floats)


def triton_policy_loss(
    logp: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    *,
    objective: Objective,
    segments: Tensor | None,
    reference: Tensor | None,
    proximal: Tensor | None,
    entropy: Tensor | None,
    m2_limit: Tensor | None,
    first_index: int,
) -> PolicyLoss:
    """policy_loss, whose arguments these are, checked. A value that is not finite is counted, and makes the loss
    and its token's coefficient NaN; first_index has no use, since nothing waits for the device."""
    num_tokens, device = logp.shape[0], logp.device
    columns = (logp, behaviour, advantage, token_weight, reference, proximal, entropy)
    tokens = tuple(None if column is None else column.detach().contiguous() for column in columns)
    if objective.needs_m2_limit and m2_limit is None:
        m2_limit = second_moment_limit((logp - behaviour).double(), token_weight != 0, objective)
    # Not zeros: a token that no segment covers must not pass for one without a gradient.
    coefficient = torch.full((num_tokens,), torch.nan, device=device)
    segment_level = objective.is_segment_level
    num_programs = triton.cdiv(num_tokens, BLOCK)
    if segment_level:
        assert segments is not None
        if segments.device.type == "cpu":
            check_segments(segments, num_tokens)
        segments = segments.to(device)
        num_programs = segments.shape[0] - 1
    if num_programs == 0 or num_tokens == 0:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return PolicyLoss(zero, coefficient, PolicyStats.zero(device))
    partials = _Partials.empty(num_programs, device)
    shared = {**codes_of(objective), "BLOCK": BLOCK, "num_warps": NUM_WARPS}
    with on_device(logp):
        if segment_level:
            policy_segments[(num_programs,)](
                tokens, segments, m2_limit, coefficient, partials.pointers(), bounds_of(objective),
                RATIO_LEVEL=int(objective.ratio_level), RHO_LEVEL=int(objective.rho_level), maxnreg=SEGMENT_REGISTERS,
                **shared,
            )  # fmt: skip
        else:
            policy_tokens[(num_programs,)](
                tokens, m2_limit, coefficient, partials.pointers(), num_tokens, bounds_of(objective), **shared,
            )  # fmt: skip
    loss, stats = partials.finish(num_tokens, segment_level)
    return PolicyLoss(loss, coefficient, stats)
