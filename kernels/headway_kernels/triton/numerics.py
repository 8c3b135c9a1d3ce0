"""Device functions for numbers: exponentials that keep their digits, tanh, and the chain from a product to a logit.

Only what Triton's language has on a GPU and in its interpreter: no libdevice.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

# policy_token.MAX_EXPONENT.
MAX_EXPONENT = tl.constexpr(20.0)
# Finite stand-in for -inf minus the row's maximum: its exponential is 0 and 0 times it is not NaN.
LOWEST_SHIFT = tl.constexpr(-1e4)
# Where a row's maximum starts: below every logit, finite so that differences are never inf - inf.
LOWEST_PEAK = tl.constexpr(-3.0e38)


@triton.jit
def is_finite(value):
    """Neither NaN nor infinite."""
    return tl.abs(value) < float("inf")


@triton.jit
def bounded(exponent):
    """Clamped to +-MAX_EXPONENT; a NaN stays one."""
    exponent = tl.where(exponent > MAX_EXPONENT, MAX_EXPONENT, exponent)
    return tl.where(exponent < -MAX_EXPONENT, -MAX_EXPONENT, exponent)


@triton.jit
def bounded_exp(exponent):
    """exp of the exponent clamped to +-MAX_EXPONENT."""
    return tl.exp(bounded(exponent))


@triton.jit
def exp_excess(x):
    """exp(x) - 1 - x without cancellation: the Taylor series up to x^9 where |x| < 0.5 (next term < 3e-10)."""
    near = tl.where(tl.abs(x) < 0.5, x, 0.0)
    series = 1.0 / 3628800.0 * near + 1.0 / 362880.0
    series = series * near + 1.0 / 40320.0
    series = series * near + 1.0 / 5040.0
    series = series * near + 1.0 / 720.0
    series = series * near + 1.0 / 120.0
    series = series * near + 1.0 / 24.0
    series = series * near + 1.0 / 6.0
    series = series * near + 0.5
    return tl.where(tl.abs(x) < 0.5, series * near * near, tl.exp(x) - 1.0 - x)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) with the exponent never positive."""
    decay = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, decay) / (1.0 + decay)


@triton.jit
def tanh_and_slope(x):
    """tanh(x) and 1 - tanh(x)^2, the latter with all its digits where tanh saturates."""
    size = tl.abs(x)
    double = -2.0 * tl.where(size > 40.0, 40.0, size)
    decay = tl.exp(double)
    magnitude = -(exp_excess(double) + double) / (1.0 + decay)
    return tl.where(x < 0, -magnitude, magnitude), 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def logit(product, bias, scale, softcap, inv_temperature, HAS_SOFTCAP: tl.constexpr):
    """Bias, logit scale, softcap, inverse temperature, in this order, on fp32 values."""
    z = (product + bias) * scale
    if HAS_SOFTCAP:
        squashed, _ = tanh_and_slope(z / softcap)
        z = squashed * softcap
    return z * inv_temperature


@triton.jit
def logit_and_slope(product, bias, scale, softcap, inv_temperature, HAS_SOFTCAP: tl.constexpr):
    """The logit and its derivative by the product, a scalar without a softcap."""
    z = (product + bias) * scale
    slope = scale * inv_temperature
    if HAS_SOFTCAP:
        squashed, rate = tanh_and_slope(z / softcap)
        return squashed * softcap * inv_temperature, rate * slope
    else:
        return z * inv_temperature, slope


@triton.jit
def exponential(z, peak):
    """exp(z - peak) and the shift z - peak, bounded below; a NaN stays one."""
    shift = z - peak
    shift = tl.where(shift < LOWEST_SHIFT, LOWEST_SHIFT, shift)
    return tl.exp(shift), shift
