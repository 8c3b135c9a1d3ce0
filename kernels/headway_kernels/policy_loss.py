"""The policy loss over tokens: loss, dL/dlogp and statistics in one pass; the objectives are in objective.py.

head_loss_step calls this for each chunk; the learner's tests and other back-ends take it as the reference.
All arithmetic is fp64: T is small beside T x V, and the sums then do not depend on how the tokens are split.

Legend: T tokens (packed), S segments, K stacked inputs.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from headway_kernels.errors import NumericsError, ShapeError, UnsupportedOption
from headway_kernels.objective import Objective
from headway_kernels.policy_stats import SUMS, PolicyStats, bucket_counts, peaks

# exp(20) = 4.9e8: no ratio beyond it can be meant, and below it the guard changes no bit.
MAX_EXPONENT = 20.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """What policy_loss returns.

    Attributes:
        loss: float64 scalar, sum(token_weight * per-token loss).
        coefficient: float32 [T], dL/dlogp (float64 when logp is); exactly 0 where the weight is 0.
        stats: statistics over the weighted tokens.
    """

    loss: Tensor
    coefficient: Tensor
    stats: PolicyStats


class _Tokens(NamedTuple):
    """Inputs as float64 [T] with every value of an unweighted token replaced by 0."""

    active: Tensor
    weight: Tensor
    logp: Tensor
    behaviour: Tensor
    advantage: Tensor
    proximal: Tensor | None
    reference: Tensor | None
    entropy: Tensor | None
    segments: Tensor | None


class _Surrogate(NamedTuple):
    """Per token: the loss, its derivative by logp, the ratio used, and which bound it met (bool [T] each)."""

    value: Tensor
    slope: Tensor
    ratio: Tensor
    high: Tensor
    low: Tensor
    dual: Tensor
    capped: Tensor


def policy_loss(
    logp: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    *,
    objective: Objective,
    segments: Tensor | None,
    reference: Tensor | None = None,
    proximal: Tensor | None = None,
    entropy: Tensor | None = None,
    first_index: int = 0,
) -> PolicyLoss:
    """Loss, dL/dlogp and statistics of packed tokens.

    Args:
        logp: float [T], the learner's log-probs at the sampling temperature.
        behaviour: float [T], the generator's log-probs of the same tokens.
        advantage: float [T].
        token_weight: float [T], mask and 1/denominator in one; a token of weight 0 contributes exactly 0,
            whatever its other inputs hold, and is no member of its segment's mean.
        objective: what to compute.
        segments: int64 [S + 1], offsets of the segments over the T tokens; read by segment-level objectives
            only.
        reference: float [T], needed by a KL term; without one it only feeds the statistics.
        proximal: float [T], allowed with correction="tis" only.
        entropy: float [T], needed by an entropy bonus; its gradient is not part of `coefficient`.
        first_index: index of the first token in the caller's numbering, for error messages.

    Returns:
        PolicyLoss.

    Raises:
        ShapeError: an input is missing or has another shape.
        UnsupportedOption: an input that the objective has no use for.
        NumericsError: a weighted token has a NaN or infinite input; names the first index.
    """
    with torch.no_grad():
        check_policy_inputs(objective, behaviour, segments, reference, proximal)
        named = {
            "token_weight": token_weight,
            "logp": logp,
            "behaviour": behaviour,
            "advantage": advantage,
            "proximal": proximal,
            "reference": reference,
            "entropy": entropy,
        }
        present = {name: tensor for name, tensor in named.items() if tensor is not None}
        tokens = _gather(objective, present, segments, first_index)
        log_ratio = tokens.logp - tokens.behaviour
        ratio = _bounded_exp(log_ratio)
        lengths, member = _membership(tokens) if objective.is_segment_level else (None, None)
        if lengths is not None and member is not None:
            surrogate = _segment_clip(objective, tokens, log_ratio, lengths, member)
        elif objective.is_clipped:
            surrogate = _token_clip(objective, tokens, ratio)
        else:
            surrogate = _cispo(objective, tokens, ratio)
        clamped = ratio.clamp(max=objective.cap)
        value, coefficient = surrogate.value, tokens.weight * surrogate.slope
        if lengths is not None and member is not None:
            # d mean(d)/d logp_t = 1/len for every t of the segment, whichever token the loss term belongs to.
            shared = _segment_sum(coefficient, member, lengths) / lengths.clamp(min=1)
            coefficient = torch.where(tokens.active, shared[member], 0.0)
        kl = _kl(objective, tokens, clamped)
        if kl is not None:
            value = value + objective.kl_coef * kl[0]
            coefficient = coefficient + (objective.kl_coef * tokens.weight) * kl[1]
        if objective.entropy_coef and tokens.entropy is not None:
            value = value - objective.entropy_coef * tokens.entropy
        stats = _statistics(tokens, surrogate, log_ratio, ratio, clamped, lengths, member)
        out_dtype = torch.promote_types(logp.dtype, torch.float32)
        return PolicyLoss(torch.dot(tokens.weight, value), coefficient.to(out_dtype), stats)


def _gather(
    objective: Objective, present: dict[str, Tensor], segments: Tensor | None, first_index: int
) -> _Tokens:
    """Checks shapes and finiteness, and replaces every value of an unweighted token by 0."""
    if objective.entropy_coef and "entropy" not in present:
        raise ShapeError(f"entropy_coef={objective.entropy_coef} needs the entropy of every token; got None")
    shape = present["logp"].shape
    for name, tensor in present.items():
        if tensor.shape != shape or tensor.dim() != 1:
            raise ShapeError(f"{name} must be [T] like logp {list(shape)}, got {list(tensor.shape)}")
    active = present["token_weight"] != 0
    stacked_KT = torch.stack([tensor.to(torch.float64) for tensor in present.values()])
    stacked_KT = torch.where(active, stacked_KT, 0.0)
    if not bool(torch.isfinite(stacked_KT).all()):
        _raise_not_finite(list(present), stacked_KT, first_index)
    columns = dict(zip(present, stacked_KT.unbind(0), strict=True))
    return _Tokens(
        active=active,
        weight=columns["token_weight"],
        logp=columns["logp"],
        behaviour=columns["behaviour"],
        advantage=columns["advantage"],
        proximal=columns.get("proximal"),
        reference=columns.get("reference"),
        entropy=columns.get("entropy"),
        segments=segments,
    )


def check_policy_inputs(
    objective: Objective,
    behaviour: Tensor | None,
    segments: Tensor | None,
    reference: Tensor | None,
    proximal: Tensor | None,
) -> None:
    """Refuses inputs that the objective lacks or has no use for.

    Raises:
        ShapeError: a needed input is None.
        UnsupportedOption: `proximal` without a correction that uses it.
    """
    if behaviour is None:
        raise ShapeError("behaviour log-probs are required: they come from the generator, never recomputed")
    if objective.needs_reference and reference is None:
        raise ShapeError(f"kl={objective.kl!r} needs the reference log-prob of every token; got None")
    if objective.is_segment_level and segments is None:
        raise ShapeError(f"objective {objective.name} needs the offsets of the segments; got None")
    if proximal is not None and objective.correction == "none":
        raise UnsupportedOption("proximal log-probs need correction='tis'; got correction='none'")


def _raise_not_finite(names: list[str], stacked_KT: Tensor, first_index: int) -> None:
    index = int((~torch.isfinite(stacked_KT)).any(0).to(torch.int8).argmax())
    values = stacked_KT[:, index].tolist()
    shown = ", ".join(f"{name}={value:g}" for name, value in zip(names, values, strict=True))
    raise NumericsError(
        f"token {first_index + index} carries loss but has a value that is not finite: {shown}; "
        "every input of a weighted token must be finite: drop its sample, or give it weight 0"
    )


def _bounded_exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp_()


def _cispo(objective: Objective, tokens: _Tokens, ratio: Tensor) -> _Surrogate:
    slope = ratio.clamp(max=objective.cap).mul_(tokens.advantage).neg_()
    never = torch.zeros_like(tokens.active)
    return _Surrogate(slope * tokens.logp, slope, ratio, never, never, never, ratio > objective.cap)


def _token_clip(objective: Objective, tokens: _Tokens, ratio: Tensor) -> _Surrogate:
    if objective.correction == "none":
        return _clip(objective, tokens.advantage, ratio)
    anchor = tokens.logp if tokens.proximal is None else tokens.proximal
    surrogate = _clip(objective, tokens.advantage, _bounded_exp(tokens.logp - anchor))
    rho = _bounded_exp(anchor - tokens.behaviour)
    factor = rho.clamp(max=objective.correction_cap)
    return surrogate._replace(
        value=surrogate.value * factor,
        slope=surrogate.slope * factor,
        ratio=rho,
        capped=rho > objective.correction_cap,
    )


def _segment_clip(
    objective: Objective, tokens: _Tokens, log_ratio: Tensor, lengths: Tensor, member: Tensor
) -> _Surrogate:
    mean = _segment_sum(torch.where(tokens.active, log_ratio, 0.0), member, lengths) / lengths.clamp(min=1)
    return _clip(objective, tokens.advantage, _bounded_exp(mean)[member])


def _clip(objective: Objective, advantage: Tensor, ratio: Tensor) -> _Surrogate:
    """The clipped surrogate of PPO with asymmetric and dual clip. The slope is by the log of the ratio."""
    low, high = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    is_high = (advantage > 0) & (ratio > high)
    is_low = (advantage < 0) & (ratio < low)
    bounded = torch.where(is_high, high, torch.where(is_low, low, ratio))
    is_dual = torch.zeros_like(is_high)
    if objective.dual_clip is not None:
        is_dual = (advantage < 0) & (ratio > objective.dual_clip)
        bounded = torch.where(is_dual, objective.dual_clip, bounded)
    value = -(bounded * advantage)
    slope = torch.where(is_high | is_low | is_dual, 0.0, value)
    return _Surrogate(value, slope, ratio, is_high, is_low, is_dual, torch.zeros_like(is_high))


def _kl(objective: Objective, tokens: _Tokens, weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Value and slope of the KL term, before its coefficient; None when there is none."""
    if not objective.needs_reference or tokens.reference is None:
        return None
    excess = tokens.logp - tokens.reference
    if objective.kl == "k1":
        return weight * excess, weight * excess
    if objective.kl == "k2":
        return weight * excess.square() / 2, weight * excess
    decay = torch.expm1((-excess).clamp_(-MAX_EXPONENT, MAX_EXPONENT))
    return weight * (decay + excess), -weight * decay


def _membership(tokens: _Tokens) -> tuple[Tensor, Tensor]:
    """Weighted tokens of each segment, float64 [S], and the segment of each token, int64 [T]."""
    assert tokens.segments is not None
    check_segments(tokens.segments, tokens.active.shape[0])
    spans = tokens.segments.diff()
    member = torch.repeat_interleave(spans)
    return _segment_sum(tokens.active.to(torch.float64), member, spans), member


def check_segments(segments: Tensor, num_tokens: int) -> list[int]:
    """The offsets as a list.

    Raises:
        ShapeError: they do not rise from 0 to `num_tokens`.
    """
    boundaries: list[int] = segments.tolist()
    if (
        not boundaries
        or boundaries[0] != 0
        or boundaries[-1] != num_tokens
        or sorted(boundaries) != boundaries
    ):
        raise ShapeError(f"segments must rise from 0 to T = {num_tokens}, got {boundaries[:8]}...")
    return boundaries


def _segment_sum(values: Tensor, member: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.float64, device=values.device).index_add_(0, member, values)


def _statistics(
    tokens: _Tokens,
    surrogate: _Surrogate,
    log_ratio: Tensor,
    ratio: Tensor,
    clamped: Tensor,
    lengths: Tensor | None,
    member: Tensor | None,
) -> PolicyStats:
    active, zero = tokens.active, torch.zeros_like(ratio)
    limited = surrogate.high | surrogate.low | surrogate.dual | surrogate.capped
    flags_KT = torch.stack(
        (active, surrogate.high, surrogate.low, surrogate.dual, surrogate.capped, limited)
    ).logical_and_(active)
    kl_reference = zero
    if tokens.reference is not None:
        excess = tokens.logp - tokens.reference
        kl_reference = clamped * (torch.expm1((-excess).clamp_(-MAX_EXPONENT, MAX_EXPONENT)) + excess)
    values_KT = torch.stack(
        (
            ratio,
            ratio.square(),
            clamped,
            surrogate.ratio,
            -log_ratio,
            kl_reference,
            zero if tokens.entropy is None else tokens.entropy,
        )
    )
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=active.device)
    sums[0] = active.shape[0]
    sums[1:7] = flags_KT.sum(1)
    # Every value of an unweighted token is finite by now, so a product with 0 removes it.
    sums[7:14] = torch.mv(values_KT, active.to(torch.float64))
    if lengths is not None and member is not None:
        sums[14] = (lengths > 0).sum()
        sums[15] = (_segment_sum(flags_KT[-1].to(torch.float64), member, lengths) > 0).sum()
    return PolicyStats(sums, peaks(log_ratio, active), bucket_counts(log_ratio, active))
