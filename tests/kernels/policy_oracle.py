"""The policy loss as the papers write it: fp64, autograd, one segment at a time; and its statistics in numpy.

Written apart from the implementation: surrogates as minima of products, not as masks; gradients by autograd.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway_kernels.objective import Objective

LEVELS = ("token", "sequence", "geometric")
CLIPPED = ("ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp")
# Every row of the table; bounds chosen so that random tokens fall on both sides of each.
OBJECTIVES: tuple[dict[str, Any], ...] = (
    {"name": "cispo", "cap": 1.1},
    {"name": "vtrace", "cap": 1.0},
    *({"name": name} for name in CLIPPED),
    {"name": "dapo", "clip_high": 0.28, "dual_clip": 1.3},
    {"name": "ppo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.2},
    {"name": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    {"name": "gspo", "clip_low": 1e-3, "clip_high": 1e-3, "dual_clip": 1.05},
    {"name": "sapo"},
    {"name": "sapo", "gate_positive": 2.0, "gate_negative": 0.5},
    {"name": "dppo_tv", "tv_bound": 0.01},
    {"name": "m2po", "m2_bound": 0.05},
)
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {"correction": "tis", "correction_cap": 1.1},
    {"correction": "icepop", "correction_floor": 0.85, "correction_cap": 1.2},
    {"correction": "mis", "correction_cap": 1.1},
)
CORRECTED: tuple[dict[str, Any], ...] = tuple(
    {**base, **correction, "correction_level": level, "proximal": proximal}
    for base in ({"name": "decoupled_ppo"}, {"name": "grpo", "dual_clip": 1.3}, {"name": "sapo"})
    for correction in CORRECTIONS
    for level in LEVELS
    for proximal in (False, True)
)


@dataclasses.dataclass
class Tokens:
    """Inputs of a policy loss, [T] each; segments: offsets; proximal and reference may be None."""

    behaviour: Tensor
    advantage: Tensor
    token_weight: Tensor
    segments: Tensor
    reference: Tensor | None = None
    proximal: Tensor | None = None

    def kept(self) -> Tensor:
        return self.token_weight != 0

    def spans(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.segments.tolist()))


def label(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


def over_segments(tokens: Tokens, values: Tensor, level: str) -> Tensor:
    """Each token's value at a level; sums and means over the weighted tokens of its segment."""
    if level == "token":
        return values
    pieces = []
    for low, high in tokens.spans():
        kept = tokens.kept()[low:high]
        inside = values[low:high][kept]
        whole = inside.sum() if level == "sequence" else inside.mean() if len(inside) else inside.sum()
        pieces.append(whole.expand(high - low))
    return torch.cat(pieces)


def m2_limit(objective: Objective, log_ratio: Tensor, kept: Tensor) -> float:
    """Take tokens away, largest square first, equal ones together, until the mean of the rest is in bound."""
    squares = sorted((float(d) ** 2 for d in log_ratio[kept]), reverse=True)
    while squares and math.fsum(squares) / len(squares) > objective.m2_bound:
        largest = squares[0]
        squares = [square for square in squares if square < largest]
    return squares[0] if squares else -1.0


def surrogate(objective: Objective, logp: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Per token: the loss without weight, KL and entropy; the objective's ratio; what rejects (bool)."""
    mu, adv = tokens.behaviour.double(), tokens.advantage.double()
    d = logp - mu
    never = torch.zeros_like(adv, dtype=torch.bool)
    prox = logp.detach() if tokens.proximal is None else tokens.proximal.double()
    log_q = d if objective.correction == "none" else logp - prox
    q = over_segments(tokens, log_q, "geometric" if objective.name == "gspo" else "token").exp()
    rejected, own = never, q.detach()
    if objective.name in ("cispo", "vtrace"):
        return -q.detach().clamp(max=objective.cap) * adv * logp, own, never
    if objective.name == "sapo":
        tau = torch.tensor(
            [objective.gate_positive if a > 0 else objective.gate_negative for a in adv.tolist()]
        ).double()
        loss = -(4 / tau) * torch.sigmoid(tau * (q - 1)) * adv
    elif objective.name == "dppo_tv":
        outward = torch.sign(q.detach() - 1) * torch.sign(adv) > 0
        rejected = outward & ((logp.detach().exp() - mu.exp()).abs() > objective.tv_bound)
        loss = -q * adv
    elif objective.name == "m2po":
        rejected = d.detach() ** 2 > m2_limit(objective, d.detach(), tokens.kept())
        loss = -q * adv
    else:
        gain = torch.minimum(q * adv, q.clamp(1 - objective.clip_low, 1 + objective.clip_high) * adv)
        if objective.dual_clip is not None:
            gain = torch.where(adv < 0, torch.maximum(gain, objective.dual_clip * adv), gain)
        loss = -gain
    if objective.correction != "none":
        own = over_segments(tokens, (prox - mu).detach(), objective.correction_level).exp()
        factor = own.clamp(max=objective.correction_cap)
        if objective.correction != "tis":
            low = objective.correction_floor if objective.correction == "icepop" else 0.0
            rejected = (own < low) | (own > objective.correction_cap)
            factor = own
        loss = loss * factor
    return torch.where(rejected, torch.zeros_like(loss), loss), own, rejected


def policy_loss(objective: Objective, logp: Tensor, entropy: Tensor, tokens: Tokens) -> Tensor:
    """The whole loss under autograd, by logp and entropy (float64 [T])."""
    loss, _, _ = surrogate(objective, logp, tokens)
    if objective.kl != "none":
        assert tokens.reference is not None
        importance = (logp - tokens.behaviour.double()).exp().detach().clamp(max=objective.cap)
        excess = logp - tokens.reference.double()
        term = {
            "k1": excess.detach() * (1 + logp - logp.detach()),
            "k2": excess**2 / 2,
            "k3": (-excess).exp() - 1 + excess,
        }[objective.kl]
        loss = loss + objective.kl_coef * importance * term
    loss = loss - objective.entropy_coef * entropy
    return (loss * tokens.token_weight.double())[tokens.kept()].sum()


def statistics(objective: Objective, logp: Tensor, entropy: Tensor, tokens: Tokens) -> dict[str, float]:
    """Every sum of policy_stats.SUMS and what its properties derive, by numpy over the weighted tokens."""
    kept = tokens.kept().numpy()
    _, own_t, rejected_t = surrogate(objective, logp, tokens)
    d_all = (logp - tokens.behaviour.double()).numpy()
    d, adv = d_all[kept], tokens.advantage.double().numpy()[kept]
    own, rejected = own_t.numpy()[kept], rejected_t.numpy()[kept]
    r = np.exp(d)
    clamped = np.minimum(r, objective.cap)
    prox = logp if tokens.proximal is None else tokens.proximal.double()
    q = np.exp((logp - prox).numpy()[kept]) if objective.correction != "none" else own
    can_clip = objective.name in (*CLIPPED, "gspo", "decoupled_ppo")
    high = can_clip & (adv > 0) & (q > 1 + objective.clip_high)
    low = can_clip & (adv < 0) & (q < 1 - objective.clip_low)
    dual = can_clip & (adv < 0) & (q > (objective.dual_clip or math.inf))
    capped = np.zeros_like(high)
    if objective.name in ("cispo", "vtrace"):
        capped = own > objective.cap
    elif objective.correction == "tis":
        capped = own > objective.correction_cap
    limited = high | low | dual | capped | rejected
    out = {
        "tokens": kept.size, "weighted": kept.sum(), "clipped_high": high.sum(), "clipped_low": low.sum(),
        "clipped_dual": dual.sum(), "capped": capped.sum(), "rejected": rejected.sum(), "limited": limited.sum(),
        "ratio": r.sum(), "ratio_squared": (r**2).sum(), "ratio_clamped": clamped.sum(),
        "ratio_clamped_squared": (clamped**2).sum(), "weight": own.sum(), "kl_behaviour_k1": (-d).sum(),
        "kl_behaviour_k2": (d**2 / 2).sum(), "kl_behaviour_k3": (r - 1 - d).sum(),
        "entropy": entropy.numpy()[kept].sum(), "not_finite": 0,
    }  # fmt: skip
    e = np.zeros_like(d) if tokens.reference is None else (logp - tokens.reference.double()).numpy()[kept]
    out["kl_reference_k1"] = (clamped * e).sum()
    out["kl_reference_k2"] = (clamped * e**2 / 2).sum()
    out["kl_reference_k3"] = (clamped * (np.exp(-e) - 1 + e)).sum()
    by_segment = [0, 0, 0]
    if objective.name == "gspo" or objective.correction_level != "token":
        place = np.cumsum(kept) - 1
        for low_i, high_i in tokens.spans():
            inside = place[low_i:high_i][kept[low_i:high_i]]
            if inside.size:
                by_segment[0] += 1
                by_segment[1] += int(limited[inside].any())
                by_segment[2] += int(rejected[inside].any())
    out["segments"], out["segments_limited"], out["segments_rejected"] = by_segment
    return {name: float(value) for name, value in out.items()}
