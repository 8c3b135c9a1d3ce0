"""The reference back-end of policy_loss: plain PyTorch in fp64, and what is formed over several tokens.

T is small beside T x V, and in fp64 the sums do not depend on how the tokens are split.

Legend: T tokens (packed), S segments, K stacked inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headway_kernels.errors import NumericsError
from headway_kernels.objective import Kl, Level, Objective
from headway_kernels.policy_loss import PolicyLoss, check_segments
from headway_kernels.policy_stats import SUMS, PolicyStats, bucket_counts, peaks
from headway_kernels.policy_token import MAX_EXPONENT, Surrogate, bounded_exp, surrogate


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


class _Segments(NamedTuple):
    """Weighted tokens of each segment, float64 [S], and the segment of each token, int64 [T]."""

    lengths: Tensor
    member: Tensor

    def total(self, values: Tensor) -> Tensor:
        """Sums over each segment, [S]; `values` must be 0 where unweighted."""
        zeros = torch.zeros_like(self.lengths)
        return zeros.index_add_(0, self.member, values)

    def mean(self, values: Tensor) -> Tensor:
        """Means over each segment's weighted tokens, [S]."""
        return self.total(values) / self.lengths.clamp(min=1)


def reference_policy_loss(
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
    """policy_loss, whose arguments these are, checked."""
    with torch.no_grad():
        named = {
            "token_weight": token_weight,
            "logp": logp,
            "behaviour": behaviour,
            "advantage": advantage,
            "proximal": proximal,
            "reference": reference,
            "entropy": entropy,
        }
        tokens = _gather({name: tensor for name, tensor in named.items() if tensor is not None}, first_index)
        groups = None
        if objective.is_segment_level:
            assert segments is not None
            groups = _group(tokens.active, segments)
        log_ratio = tokens.logp - tokens.behaviour
        if objective.needs_m2_limit:
            limit = (
                m2_limit if m2_limit is not None else second_moment_limit(log_ratio, tokens.active, objective)
            )
            m2_limit = limit.to(torch.float64)
        terms = _terms(objective, tokens, log_ratio, groups, m2_limit)
        ratio = bounded_exp(log_ratio)
        clamped = ratio.clamp(max=objective.cap)
        value, coefficient = terms.value, tokens.weight * terms.slope
        if objective.ratio_level is Level.GEOMETRIC and groups is not None:
            # d mean(d)/d logp_t = 1/len for every t of the segment, whichever token the loss term belongs to.
            coefficient = torch.where(tokens.active, groups.mean(coefficient)[groups.member], 0.0)
        if tokens.reference is not None:
            excess = tokens.logp - tokens.reference
            kl_value, kl_slope = _kl(objective, excess, clamped)
            value = value + kl_value
            coefficient = coefficient + tokens.weight * kl_slope
        if objective.entropy_coef and tokens.entropy is not None:
            value = value - objective.entropy_coef * tokens.entropy
        stats = _statistics(tokens, terms, log_ratio, ratio, clamped, groups)
        out_dtype = torch.promote_types(logp.dtype, torch.float32)
        return PolicyLoss(torch.dot(tokens.weight, value), coefficient.to(out_dtype), stats)


def second_moment_limit(log_ratio: Tensor, active: Tensor, objective: Objective) -> Tensor:
    """The m2_limit of m2po: the largest squared log-ratio at which the mean over the tokens kept is in bound.

    Over all tokens of an optimizer step, whatever its rows and ranks: gather the log-ratios first.

    Args:
        log_ratio: float [T], pi - mu. active: bool [T], the weighted tokens.
        objective: its m2_bound is the bound of mean((pi - mu)^2 over the tokens with a square <= limit).

    Returns:
        float64 scalar; -1 if not even the smallest may stay. Tokens of equal squares stay or go together.
    """
    squares = log_ratio[active].to(torch.float64).square().sort().values
    counts = torch.arange(1, squares.shape[0] + 1, dtype=torch.float64, device=squares.device)
    means = squares.cumsum(0) / counts
    # The mean over {square <= v} is the running mean at the last place of v.
    last = torch.ones_like(squares, dtype=torch.bool)
    last[:-1] = squares[1:] > squares[:-1]
    fits = last & (means <= objective.m2_bound)
    return torch.where(fits, squares, -1.0).amax() if squares.shape[0] else squares.new_tensor(-1.0)


def _gather(present: dict[str, Tensor], first_index: int) -> _Tokens:
    """Checks finiteness, and replaces every value of an unweighted token by 0."""
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
    )


def _raise_not_finite(names: list[str], stacked_KT: Tensor, first_index: int) -> None:
    index = int((~torch.isfinite(stacked_KT)).any(0).to(torch.int8).argmax())
    values = stacked_KT[:, index].tolist()
    shown = ", ".join(f"{name}={value:g}" for name, value in zip(names, values, strict=True))
    raise NumericsError(
        f"token {first_index + index} carries loss but has a value that is not finite: {shown}; "
        "every input of a weighted token must be finite: drop its sample, or give it weight 0"
    )


def _group(active: Tensor, segments: Tensor) -> _Segments:
    check_segments(segments, active.shape[0])
    spans = segments.to(active.device).diff()
    member = torch.repeat_interleave(spans)
    lengths = torch.zeros(spans.shape, dtype=torch.float64, device=active.device)
    return _Segments(lengths.index_add_(0, member, active.to(torch.float64)), member)


def _terms(
    objective: Objective,
    tokens: _Tokens,
    log_ratio: Tensor,
    groups: _Segments | None,
    m2_limit: Tensor | None,
) -> Surrogate:
    """The surrogate of each token, its log-ratios formed at their levels."""
    log_q, log_rho = log_ratio, None
    if objective.correction != "none":
        anchor = tokens.logp if tokens.proximal is None else tokens.proximal
        log_q = tokens.logp - anchor
        log_rho = _at_level(objective.rho_level, anchor - tokens.behaviour, groups)
    log_q = _at_level(objective.ratio_level, log_q, groups)
    return surrogate(objective, tokens.advantage, tokens.logp, tokens.behaviour, log_q, log_rho, m2_limit)


def _at_level(level: Level, values: Tensor, groups: _Segments | None) -> Tensor:
    if level is Level.TOKEN:
        return values
    assert groups is not None
    over = groups.total(values) if level is Level.SEQUENCE else groups.mean(values)
    return over[groups.member]


def _kl(objective: Objective, excess: Tensor, clamped: Tensor) -> tuple[Tensor, Tensor]:
    """Value and slope of the KL term with its coefficient; 0 where there is none."""
    weight = objective.kl_coef * clamped
    if objective.kl_code is Kl.K1:
        return weight * excess, weight * excess
    if objective.kl_code is Kl.K2:
        return weight * excess.square() / 2, weight * excess
    if objective.kl_code is Kl.K3:
        decay = _decay(excess)
        return weight * (decay + excess), -weight * decay
    return torch.zeros_like(excess), torch.zeros_like(excess)


def _decay(excess: Tensor) -> Tensor:
    """exp(-e) - 1 without cancellation, its exponent bounded."""
    return torch.expm1((-excess).clamp_(-MAX_EXPONENT, MAX_EXPONENT))


def _statistics(
    tokens: _Tokens,
    terms: Surrogate,
    log_ratio: Tensor,
    ratio: Tensor,
    clamped: Tensor,
    groups: _Segments | None,
) -> PolicyStats:
    active, zero = tokens.active, torch.zeros_like(ratio)
    limited = terms.high | terms.low | terms.dual | terms.capped | terms.rejected
    flags = (active, terms.high, terms.low, terms.dual, terms.capped, terms.rejected, limited)
    flags_KT = torch.stack(flags).logical_and_(active)
    kl_reference = (zero, zero, zero)
    if tokens.reference is not None:
        excess = tokens.logp - tokens.reference
        kl_reference = (
            clamped * excess,
            clamped * excess.square() / 2,
            clamped * (_decay(excess) + excess),
        )
    bounded = log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    values = (
        ratio,
        ratio.square(),
        clamped,
        clamped.square(),
        terms.weight,
        -log_ratio,
        log_ratio.square() / 2,
        torch.expm1(bounded) - log_ratio,
        *kl_reference,
        zero if tokens.entropy is None else tokens.entropy,
    )
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=active.device)
    sums[0] = active.shape[0]
    sums[1:8] = flags_KT.sum(1)
    # Every value of an unweighted token is finite by now, so a product with 0 removes it.
    sums[8:20] = torch.mv(torch.stack(values), active.to(torch.float64))
    if groups is not None:
        sums[20] = (groups.lengths > 0).sum()
        sums[21] = (groups.total(flags_KT[6].to(torch.float64)) > 0).sum()
        sums[22] = (groups.total(flags_KT[5].to(torch.float64)) > 0).sum()
    return PolicyStats(sums, peaks(log_ratio, clamped, active), bucket_counts(log_ratio, active))
