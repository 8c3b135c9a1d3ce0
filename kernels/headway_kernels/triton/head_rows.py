"""Kernels over rows of a chunk of fp32 logits: scores, the policy loss inlined, and dL/dlogits in place.

The chunk's buffer holds products x weight^T in fp32, [N, stride] with stride >= V. dL/d(product) is written over
them: in fp32 element for element; in bf16 into the upper half of each row's bytes, from the last block of columns to
the first, so that nothing is overwritten before it is read:

    block k is read at bytes [4 k B, 4 (k + 1) B) and written at [2 stride + 2 k B, 2 stride + 2 (k + 1) B), and
    2 stride + 2 k B >= 4 k B because k B < stride. A barrier parts a block's loads from its stores.

The second pass meets the row's end first, which the first pass left in the cache.

Legend: N rows of the chunk, V vocabulary, B columns of a block.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from headway_kernels.triton.numerics import LOWEST_PEAK, LOWEST_SHIFT, exponential, logit, logit_and_slope
from headway_kernels.triton.policy_token import token_coefficient

BLOCK = 4096
# Where a bias of unknown alignment gives each value an address of its own.
BLOCK_RAGGED = 2048
NUM_WARPS = 8
# Two blocks of 8 warps at once. Said aloud, because ptxas may aim at fewer on its own and spill.
MAX_REGISTERS = 128


def block_of(vocabulary: int, *, has_bias: bool) -> int:
    """Columns of a block; a row's bits depend on it, so only the head decides it."""
    return BLOCK_RAGGED if has_bias and vocabulary % 16 else BLOCK


@triton.jit
def _bias_block(bias_ptr, columns, V):
    if bias_ptr is not None:
        return tl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def _score(
    row_ptr, V, stride, bias_ptr, target, owned, inv_temperature, scale, softcap,
    HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: largest logit, sums over the other columns than the target, the target's logit (-inf if not owned).

    The target is left out of the sums, so that 1 - p(target) = rest / (rest + exp(target - peak)) has all its
    digits where the target takes nearly all the mass.
    """
    peak = tl.full([BLOCK], LOWEST_PEAK, tl.float32)
    rest = tl.zeros([BLOCK], tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        product = tl.load(row_ptr + columns, mask=columns < stride, other=0.0)
        z = logit(product, _bias_block(bias_ptr, columns, V), scale, softcap, inv_temperature, HAS_SOFTCAP)
        z = tl.where((columns < V) & (columns != target), z, float("-inf"))
        higher = tl.maximum(peak, z)
        faded = tl.maximum(peak - higher, LOWEST_SHIFT)
        fade = tl.exp(faded)
        e, shift = exponential(z, higher)
        dot = fade * (dot + faded * rest) + e * shift
        rest = fade * rest + e
        peak = higher
    picked = float("-inf")
    if owned:
        product = tl.load(row_ptr + target)
        bias = 0.0
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + target).to(tl.float32)
        picked = logit(product, bias, scale, softcap, inv_temperature, HAS_SOFTCAP)
    highest = tl.maximum(tl.max(peak, 0), picked)
    faded = tl.maximum(peak - highest, LOWEST_SHIFT)
    fade = tl.exp(faded)
    return highest, tl.sum(fade * rest, 0), tl.sum(fade * (dot + faded * rest), 0), picked


@triton.jit
def _finish_scores(highest, rest, dot, picked):
    """log-prob, logsumexp, entropy, total and 1 - p(target) of a whole row from _score's values."""
    own, shift = exponential(picked, highest)
    total = rest + own
    log_total = tl.log(total)
    entropy = log_total - (dot + own * shift) / total
    return picked - highest - log_total, highest + log_total, entropy, total, rest / total


@triton.jit
def _differentiate(
    row_ptr, out_ptr, V, stride, bias_ptr, target, owned, inv_temperature, scale, softcap,
    highest, total, miss, logp, entropy, coefficient, entropy_weight,
    HAS_SOFTCAP: tl.constexpr, ENTROPY_TERM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes dL/d(product) of one row: (c (onehot - p) + h p (log p + H)) times the chain's slope."""
    inverse, log_total = 1.0 / total, tl.log(total)
    dtype = out_ptr.dtype.element_ty
    num_blocks = tl.cdiv(V, BLOCK)
    for i in range(num_blocks):
        columns = (num_blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < stride
        product = tl.load(row_ptr + columns, mask=inside, other=0.0)
        bias = _bias_block(bias_ptr, columns, V)
        z, slope = logit_and_slope(product, bias, scale, softcap, inv_temperature, HAS_SOFTCAP)
        e, shift = exponential(z, highest)
        p = e * inverse
        gradient = -coefficient * p
        if ENTROPY_TERM:
            gradient += entropy_weight * p * (shift - log_total + entropy)
        # 1 - p(target) comes from a sum without the target: it has no cancellation.
        at_target = coefficient * miss
        if ENTROPY_TERM:
            at_target += entropy_weight * (1.0 - miss) * (logp + entropy)
        gradient = tl.where((columns == target) & owned, at_target, gradient) * slope
        tl.debug_barrier()
        tl.store(out_ptr + columns, tl.where(columns < V, gradient, 0.0).to(dtype), mask=inside)


@triton.jit
def _erase(out_ptr, V, stride, BLOCK: tl.constexpr):
    """Writes a row of zeros: the row takes no part."""
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + columns, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=columns < stride)


@triton.jit
def _load_optional(pointer, row):
    if pointer is not None:
        return tl.load(pointer + row).to(tl.float32)
    else:
        return 0.0


@triton.jit
def loss_rows(
    products_ptr, gradient_ptr, stride, gradient_stride, V, bias_ptr, target_ptr, inv_temperature_ptr,
    scale, softcap, tokens, m2_limit_ptr, bounds, logp_ptr, entropy_ptr, live_ptr,
    HAS_SOFTCAP: tl.constexpr, FAMILY: tl.constexpr, CORRECTION: tl.constexpr, DUAL_CLIP: tl.constexpr,
    KL: tl.constexpr, ENTROPY_TERM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program, for token-level objectives: scores, policy loss and gradient in one kernel.

    Args:
        products_ptr: fp32 [N, stride]; gradient_ptr: the same bytes, see the module's docstring.
        bias_ptr: float [V] or None. target_ptr: int64 [N]. inv_temperature_ptr: float [N].
        tokens: pointers to behaviour, advantage, weight, reference, proximal; [N], the last two None if missing.
        m2_limit_ptr: to a float scalar, or None. bounds: see policy_token.
        logp_ptr, entropy_ptr: fp32 [N], written; the latter None if not wanted. live_ptr: int8 [N], written: the
            row takes part in the gradients.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = products_ptr + row * stride
    out_ptr = gradient_ptr + row * gradient_stride
    target = tl.load(target_ptr + row)
    inv_temperature = tl.load(inv_temperature_ptr + row).to(tl.float32)
    highest, rest, dot, picked = _score(
        row_ptr, V, stride, bias_ptr, target, True, inv_temperature, scale, softcap, HAS_SOFTCAP, BLOCK
    )
    logp, _, entropy, total, miss = _finish_scores(highest, rest, dot, picked)
    tl.store(logp_ptr + row, logp)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)
    limit = 0.0
    if m2_limit_ptr is not None:
        limit = tl.load(m2_limit_ptr).to(tl.float32)
    weight = tl.load(tokens[2] + row).to(tl.float32)
    coefficient = token_coefficient(
        weight, tl.load(tokens[1] + row).to(tl.float32), logp, tl.load(tokens[0] + row).to(tl.float32),
        _load_optional(tokens[4], row), _load_optional(tokens[3], row), limit, bounds,
        FAMILY, CORRECTION, DUAL_CLIP, KL, tokens[4] is not None,
    )  # fmt: skip
    entropy_weight = 0.0
    live = coefficient != 0
    if ENTROPY_TERM:
        entropy_weight = weight * bounds[10]
        live = live | (entropy_weight != 0)
    tl.store(live_ptr + row, live.to(tl.int8))
    if live:
        _differentiate(
            row_ptr, out_ptr, V, stride, bias_ptr, target, True, inv_temperature, scale, softcap,
            highest, total, miss, logp, entropy, coefficient, entropy_weight, HAS_SOFTCAP, ENTROPY_TERM, BLOCK,
        )  # fmt: skip
    else:
        _erase(out_ptr, V, stride, BLOCK)


@triton.jit
def score_rows(
    products_ptr, stride, V, bias_ptr, target_ptr, inv_temperature_ptr, scale, softcap, first_column, parts_ptr,
    HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program: its scores alone, where the coefficient needs other rows or other ranks.

    Args:
        first_column: id of the weight's first row; a target outside [first_column, first_column + V) belongs to
            another rank.
        parts_ptr: fp32 [N, 4], written: peak, sum of the other columns' exp(z - peak), their sum of exp(z - peak)
            (z - peak), the target's logit (-inf if another rank has it). The rest: as in loss_rows.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row) - first_column
    inv_temperature = tl.load(inv_temperature_ptr + row).to(tl.float32)
    highest, rest, dot, picked = _score(
        products_ptr + row * stride, V, stride, bias_ptr, target, (target >= 0) & (target < V), inv_temperature,
        scale, softcap, HAS_SOFTCAP, BLOCK,
    )  # fmt: skip
    tl.store(parts_ptr + row * 4, highest)
    tl.store(parts_ptr + row * 4 + 1, rest)
    tl.store(parts_ptr + row * 4 + 2, dot)
    tl.store(parts_ptr + row * 4 + 3, picked)


@triton.jit
def gradient_rows(
    products_ptr, gradient_ptr, stride, gradient_stride, V, bias_ptr, target_ptr, inv_temperature_ptr,
    scale, softcap, first_column, scores, coefficient_ptr, entropy_weight_ptr, live_ptr,
    HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program: its gradient, once the coefficient is known.

    Args:
        scores: pointers to peak, total, miss, logp, entropy, fp32 [N], over the whole vocabulary; entropy is None
            without an entropy term. coefficient_ptr: float [N]. entropy_weight_ptr: float [N] or None. live_ptr:
            int8 [N], written. The rest: as in loss_rows and score_rows.
    """
    row = tl.program_id(0).to(tl.int64)
    out_ptr = gradient_ptr + row * gradient_stride
    target = tl.load(target_ptr + row) - first_column
    coefficient = tl.load(coefficient_ptr + row).to(tl.float32)
    entropy_weight = _load_optional(entropy_weight_ptr, row)
    live = (coefficient != 0) | (entropy_weight != 0)
    tl.store(live_ptr + row, live.to(tl.int8))
    if live:
        _differentiate(
            products_ptr + row * stride, out_ptr, V, stride, bias_ptr, target, (target >= 0) & (target < V),
            tl.load(inv_temperature_ptr + row).to(tl.float32), scale, softcap, tl.load(scores[0] + row),
            tl.load(scores[1] + row), tl.load(scores[2] + row), tl.load(scores[3] + row),
            _load_optional(scores[4], row), coefficient, entropy_weight,
            HAS_SOFTCAP, entropy_weight_ptr is not None, BLOCK,
        )  # fmt: skip
    else:
        _erase(out_ptr, V, stride, BLOCK)
