"""The reference back-end of segment_scan: a doubling scan in fp64, log2(longest segment) sweeps over the tokens.

Legend: T tokens (packed), A active tokens, S segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway_kernels.errors import NumericsError
from headway_kernels.policy_loss import check_segments
from headway_kernels.policy_token import bounded_exp
from headway_kernels.segment_scan import ScanKind, SegmentScan


def reference_segment_scan(
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
    """segment_scan, whose arguments these are, checked."""
    with torch.no_grad():
        check_segments(segments, rewards.shape[0])
        active = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
        places = active.nonzero()[:, 0]
        member = torch.repeat_interleave(segments.diff())[places]
        last = torch.ones_like(member, dtype=torch.bool)
        last[:-1] = member[1:] != member[:-1]
        reward = _pick("rewards", rewards, places)
        value = torch.zeros_like(reward) if values is None else _pick("values", values, places)
        after = torch.zeros(segments.shape[0] - 1, dtype=torch.float64, device=rewards.device)
        if bootstrap is not None:
            after = bootstrap.to(torch.float64)
        tail = after[member]
        next_value = torch.where(last, tail, torch.roll(value, -1))
        step = torch.full_like(reward, gamma)
        if kind == "return":
            # The bootstrap enters at the last token.
            target = _scan(reward + torch.where(last, gamma * tail, 0.0), step, last)
            advantage = target - value
        elif kind == "gae":
            advantage = _scan(reward + gamma * next_value - value, step * lam, last)
            target = advantage + value
        else:
            assert log_ratio is not None
            ratio = bounded_exp(_pick("log_ratio", log_ratio, places))
            delta = ratio.clamp(max=rho_cap) * (reward + gamma * next_value - value)
            target = value + _scan(delta, step * lam * ratio.clamp(max=c_cap), last)
            advantage = reward + gamma * torch.where(last, tail, torch.roll(target, -1)) - value
        dtype = torch.promote_types(rewards.dtype, torch.float32)
        empty = torch.zeros_like(rewards, dtype=dtype)
        return SegmentScan(*(empty.index_put((places,), part.to(dtype)) for part in (advantage, target)))


def _pick(name: str, values: Tensor, places: Tensor) -> Tensor:
    """The active tokens' values in float64, checked to be finite."""
    picked = values[places].to(torch.float64)
    finite = torch.isfinite(picked)
    if not bool(finite.all()):
        index = int(places[int((~finite).to(torch.int8).argmax())])
        raise NumericsError(
            f"{name} of active token {index} is {float(values[index])}: every input of an active token must be "
            "finite; mask it, or drop its sample"
        )
    return picked


def _scan(gain: Tensor, factor: Tensor, last: Tensor) -> Tensor:
    """y_i = gain_i + factor_i y_{i+1}, with factor 0 at the last token of a segment.

    Args:
        gain, factor: float64 [A]. last: bool [A].
    """
    total, reach = gain.clone(), torch.where(last, 0.0, factor)
    width = 1
    while width < total.shape[0] and bool(reach[:-width].any()):
        # Token i now covers [i, i + width): join it with what i + width covers. Read before writing.
        joined = total[:-width] + reach[:-width] * total[width:]
        through = reach[:-width] * reach[width:]
        total[:-width] = joined
        reach[:-width] = through
        width *= 2
    return total
