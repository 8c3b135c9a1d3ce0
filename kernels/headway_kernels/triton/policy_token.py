"""The formula of one token of the policy loss, headway_kernels/policy_token.py line by line, as a device function.

The kernels of policy_loss call it on blocks of tokens, head_rows' on the one token of its row: the same source.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from headway_kernels.objective import Correction, Family, Kl
from headway_kernels.triton.numerics import bounded, bounded_exp, exp_excess, is_finite, sigmoid

_CLIP = tl.constexpr(int(Family.CLIP))
_CAP = tl.constexpr(int(Family.CAP))
_GATE = tl.constexpr(int(Family.GATE))
_TV = tl.constexpr(int(Family.TV))
_TIS = tl.constexpr(int(Correction.TIS))
_ICEPOP = tl.constexpr(int(Correction.ICEPOP))
_NO_CORRECTION = tl.constexpr(int(Correction.NONE))
_K1 = tl.constexpr(int(Kl.K1))
_K2 = tl.constexpr(int(Kl.K2))
_K3 = tl.constexpr(int(Kl.K3))


@triton.jit
def policy_token(
    advantage,
    pi,
    mu,
    log_q,
    log_rho,
    m2_limit,
    bounds,
    FAMILY: tl.constexpr,
    CORRECTION: tl.constexpr,
    DUAL_CLIP: tl.constexpr,
):
    """The surrogate of a weighted token with finite inputs.

    Args:
        advantage, pi, mu, log_q, log_rho: fp32, of one shape. m2_limit: fp32 scalar, read by M2.
        bounds: (clip_lower, clip_upper, dual_clip, cap, correction_cap, correction_floor, gate_positive,
            gate_negative, tv_bound, kl_coef, entropy_coef), fp32; clip_lower = 1 - clip_low, clip_upper = 1 +
            clip_high. See bounds_of.

    Returns:
        value, slope, weight, then the flags high, low, dual, capped, rejected.
    """
    clip_lower, clip_upper, dual_clip, cap = bounds[0], bounds[1], bounds[2], bounds[3]
    correction_cap, correction_floor = bounds[4], bounds[5]
    q = bounded_exp(log_q)
    never = q < 0
    high, low, dual, capped, rejected = never, never, never, never, never
    if FAMILY == _CLIP:
        high = (advantage > 0) & (q > clip_upper)
        low = (advantage < 0) & (q < clip_lower)
        inside = tl.where(high, clip_upper, tl.where(low, clip_lower, q))
        if DUAL_CLIP:
            dual = (advantage < 0) & (q > dual_clip)
            inside = tl.where(dual, dual_clip, inside)
        value = -(inside * advantage)
        slope = tl.where(high | low | dual, 0.0, value)
    elif FAMILY == _CAP:
        capped = q > cap
        slope = -(tl.minimum(q, cap) * advantage)
        value = slope * pi
    elif FAMILY == _GATE:
        tau = tl.where(advantage > 0, bounds[6], bounds[7])
        opened, shut = sigmoid(tau * (q - 1.0)), sigmoid(tau * (1.0 - q))
        value = -advantage * opened * (4.0 / tau)
        slope = -4.0 * advantage * q * opened * shut
    else:
        if FAMILY == _TV:
            away = ((advantage > 0) & (q > 1.0)) | ((advantage < 0) & (q < 1.0))
            moved = tl.abs(tl.exp(tl.minimum(pi, 0.0)) - tl.exp(tl.minimum(mu, 0.0)))
            rejected = away & (moved > bounds[8])
        else:
            rejected = (pi - mu) * (pi - mu) > m2_limit
        value = tl.where(rejected, 0.0, -(q * advantage))
        slope = value
    weight = q
    if CORRECTION != _NO_CORRECTION:
        rho = bounded_exp(log_rho)
        weight = rho
        above = rho > correction_cap
        if CORRECTION == _TIS:
            capped = above
            factor = tl.minimum(rho, correction_cap)
        else:
            rejected = above
            if CORRECTION == _ICEPOP:
                rejected = above | (rho < correction_floor)
            factor = tl.where(rejected, 0.0, rho)
        value *= factor
        slope *= factor
    return value, slope, weight, high, low, dual, capped, rejected


@triton.jit
def kl_token(pi, mu, ref, cap, kl_coef, KL: tl.constexpr):
    """Value and slope of the KL to the reference with its coefficient."""
    weight = kl_coef * tl.minimum(bounded_exp(pi - mu), cap)
    excess = pi - ref
    if KL == _K1:
        value = weight * excess
        return value, value
    elif KL == _K2:
        return weight * excess * excess * 0.5, weight * excess
    elif KL == _K3:
        value, decay = k3_token(excess)
        return weight * value, -(weight * decay)
    else:
        return excess * 0.0, excess * 0.0


@triton.jit
def k3_token(excess):
    """u + e and u = expm1(-e), the exponent bounded, both without cancellation."""
    exponent = bounded(-excess)
    tail = exp_excess(exponent)
    return tail + (exponent + excess), tail + exponent


@triton.jit
def anchored(pi, mu, proximal, CORRECTION: tl.constexpr, HAS_PROXIMAL: tl.constexpr):
    """log_q and log_rho of a token at token level."""
    if CORRECTION == _NO_CORRECTION:
        return pi - mu, pi * 0.0
    elif HAS_PROXIMAL:
        return pi - proximal, proximal - mu
    else:
        return pi * 0.0, pi - mu


@triton.jit
def all_finite(weight, advantage, pi, mu, proximal, ref, entropy):
    """No input of the token is NaN or infinite."""
    finite = is_finite(weight) & is_finite(advantage) & is_finite(pi) & is_finite(mu)
    return finite & is_finite(proximal) & is_finite(ref) & is_finite(entropy)


@triton.jit
def token_coefficient(
    weight,
    advantage,
    pi,
    mu,
    proximal,
    ref,
    m2_limit,
    bounds,
    FAMILY: tl.constexpr,
    CORRECTION: tl.constexpr,
    DUAL_CLIP: tl.constexpr,
    KL: tl.constexpr,
    HAS_PROXIMAL: tl.constexpr,
):
    """dL/dpi at token level: exactly 0 where the weight is 0, NaN where an input of a weighted token is not finite.

    Args:
        weight ... ref: fp32; proximal and ref 0 where there is none. m2_limit, bounds: as in policy_token.
    """
    active = weight != 0
    finite = all_finite(weight, advantage, pi, mu, proximal, ref, 0.0)
    use = active & finite
    weight, advantage = tl.where(use, weight, 0.0), tl.where(use, advantage, 0.0)
    pi, mu = tl.where(use, pi, 0.0), tl.where(use, mu, 0.0)
    proximal, ref = tl.where(use, proximal, 0.0), tl.where(use, ref, 0.0)
    log_q, log_rho = anchored(pi, mu, proximal, CORRECTION, HAS_PROXIMAL)
    _, slope, _, _, _, _, _, _ = policy_token(
        advantage, pi, mu, log_q, log_rho, m2_limit, bounds, FAMILY, CORRECTION, DUAL_CLIP
    )
    _, kl_slope = kl_token(pi, mu, ref, bounds[3], bounds[9], KL)
    coefficient = weight * (slope + kl_slope)
    return tl.where(active, tl.where(finite, coefficient, float("nan")), 0.0)
