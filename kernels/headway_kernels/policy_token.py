"""The formula of one token of the policy loss: what every back-end translates line by line.

In, per token: w (weight), A, pi, mu, log_q, log_rho, and where the objective has them ref and m2_limit.
log_q and log_rho are pi - mu and 0 without a correction, pi - prox and prox - mu with one; at a segment level
they are the segment's value, formed before by policy_loss.py (sum or mean over the weighted tokens). Scalars: the
fields of Objective, codes from its enums. bexp(x) = exp(clamp(x, -20, 20)). Everything below holds where w != 0;
where w == 0 all inputs are ignored and all outputs are exactly 0 (select, never multiply).

    r = bexp(pi - mu);  q = bexp(log_q);  rho = bexp(log_rho)
    high = low = dual = capped = rejected = False
    CLIP: high = A > 0 and q > 1 + clip_high;  low = A < 0 and q < 1 - clip_low
          dual = A < 0 and q > dual_clip                                        (no dual_clip: never)
          bounded = 1 + clip_high if high, 1 - clip_low if low, dual_clip if dual, else q
          value = -A bounded;  slope = 0 if high or low or dual else value
    CAP:  capped = q > cap;  slope = -A min(q, cap);  value = slope pi
    GATE: tau = gate_positive if A > 0 else gate_negative;  g = sigmoid(tau (q - 1)), h = sigmoid(tau (1 - q))
          value = -A g 4 / tau;  slope = -A q 4 g h
    TV:   away = (A > 0 and q > 1) or (A < 0 and q < 1)
          rejected = away and |exp(min(pi, 0)) - exp(min(mu, 0))| > tv_bound
          value = slope = 0 if rejected else -A q
    M2:   rejected = (pi - mu)^2 > m2_limit;  value = slope = 0 if rejected else -A q
    TIS:    capped = rho > correction_cap;  factor = min(rho, correction_cap)
    ICEPOP: rejected = rho < correction_floor or rho > correction_cap;  factor = 0 if rejected else rho
    MIS:    rejected = rho > correction_cap;  factor = 0 if rejected else rho
    value *= factor;  slope *= factor;  weight = rho with a correction, else q
    c = w slope
    at ratio level GEOMETRIC (gspo): c = (sum of c over the segment's weighted tokens) / (their number)
    KL, with m = min(r, cap), e = pi - ref, u = expm1(clamp(-e, -20, 20)):
      K1: value += kl_coef m e;        c += kl_coef w m e
      K2: value += kl_coef m e^2 / 2;  c += kl_coef w m e
      K3: value += kl_coef m (u + e);  c -= kl_coef w m u
    entropy bonus: value -= entropy_coef H      (its gradient is the head's: policy_loss has none of H)
    loss = sum of w value;  dL/dpi = c

This module is the reference in PyTorch, float64 [T], without the last three steps of c, which policy_loss.py adds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headway_kernels.objective import Correction, Family, Objective

# exp(20) = 4.9e8: no ratio beyond it can be meant, and below it the guard changes no bit.
MAX_EXPONENT = 20.0


class Surrogate(NamedTuple):
    """Per token: loss and derivative by log q, the objective's own ratio, and the bounds met (bool)."""

    value: Tensor
    slope: Tensor
    weight: Tensor
    high: Tensor
    low: Tensor
    dual: Tensor
    capped: Tensor
    rejected: Tensor


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp of the exponent clamped to +-MAX_EXPONENT."""
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp_()


def surrogate(
    objective: Objective,
    advantage: Tensor,
    logp: Tensor,
    behaviour: Tensor,
    log_q: Tensor,
    log_rho: Tensor | None,
    m2_limit: Tensor | None,
) -> Surrogate:
    """The objective's term of each token, before its weight, KL and entropy.

    Args:
        advantage, logp, behaviour, log_q: float64 [T]. log_rho: the same; None without a correction.
        m2_limit: float64 scalar, needed by m2po.
    """
    ratio = bounded_exp(log_q)
    if objective.family is Family.CLIP:
        out = _clip(objective, advantage, ratio)
    elif objective.family is Family.CAP:
        out = _cap(objective, advantage, ratio, logp)
    elif objective.family is Family.GATE:
        out = _gate(objective, advantage, ratio)
    elif objective.family is Family.TV:
        moved = behaviour.clamp(max=0).exp_().sub_(logp.clamp(max=0).exp_()).abs_()
        away = ((advantage > 0) & (ratio > 1)) | ((advantage < 0) & (ratio < 1))
        out = _mask(advantage, ratio, away & (moved > objective.tv_bound))
    else:
        assert m2_limit is not None
        out = _mask(advantage, ratio, (logp - behaviour).square_() > m2_limit)
    return out if log_rho is None else _correct(objective, out, bounded_exp(log_rho))


def _clip(objective: Objective, advantage: Tensor, ratio: Tensor) -> Surrogate:
    lower, upper = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    high = (advantage > 0) & (ratio > upper)
    low = (advantage < 0) & (ratio < lower)
    dual = torch.zeros_like(high)
    bounded = torch.where(high, upper, torch.where(low, lower, ratio))
    if objective.dual_clip is not None:
        dual = (advantage < 0) & (ratio > objective.dual_clip)
        bounded = torch.where(dual, objective.dual_clip, bounded)
    value = -(bounded * advantage)
    never = torch.zeros_like(high)
    return Surrogate(value, torch.where(high | low | dual, 0.0, value), ratio, high, low, dual, never, never)


def _cap(objective: Objective, advantage: Tensor, ratio: Tensor, logp: Tensor) -> Surrogate:
    slope = ratio.clamp(max=objective.cap).mul_(advantage).neg_()
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(slope * logp, slope, ratio, never, never, never, ratio > objective.cap, never)


def _gate(objective: Objective, advantage: Tensor, ratio: Tensor) -> Surrogate:
    tau = torch.where(advantage > 0, objective.gate_positive, objective.gate_negative).to(ratio.dtype)
    opened = torch.sigmoid(tau * (ratio - 1))
    shut = torch.sigmoid(tau * (1 - ratio))
    never = torch.zeros_like(ratio, dtype=torch.bool)
    value = -advantage * opened * (4 / tau)
    return Surrogate(value, -4 * advantage * ratio * opened * shut, ratio, never, never, never, never, never)


def _mask(advantage: Tensor, ratio: Tensor, rejected: Tensor) -> Surrogate:
    value = torch.where(rejected, 0.0, -(ratio * advantage))
    never = torch.zeros_like(rejected)
    return Surrogate(value, value, ratio, never, never, never, never, rejected)


def _correct(objective: Objective, out: Surrogate, rho: Tensor) -> Surrogate:
    above = rho > objective.correction_cap
    if objective.correction_code is Correction.TIS:
        factor = rho.clamp(max=objective.correction_cap)
        out = out._replace(capped=above)
    else:
        rejected = above
        if objective.correction_code is Correction.ICEPOP:
            rejected = above | (rho < objective.correction_floor)
        factor = torch.where(rejected, 0.0, rho)
        out = out._replace(rejected=rejected)
    return out._replace(value=out.value * factor, slope=out.slope * factor, weight=rho)
