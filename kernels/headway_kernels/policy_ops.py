"""policy_loss and segment_scan as torch custom ops; see tracing.py.

The statistics pass as their three tensors; policy_stats.PolicyStats names them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway_kernels import policy_loss as loss_module
from headway_kernels import segment_scan as scan_module
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import PolicyLoss
from headway_kernels.policy_stats import NUM_BUCKETS, SUMS, PolicyStats
from headway_kernels.segment_scan import SegmentScan


def stats_like(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty sums, peaks and buckets on the tensor's device."""
    sums, peaks, buckets = (
        tensor.new_empty(size, dtype=torch.float64) for size in (len(SUMS), 3, NUM_BUCKETS)
    )
    return sums, peaks, buckets


def apart(*outputs: Tensor) -> tuple[Tensor, ...]:
    """The outputs, cloned where they are views of one tensor: a custom op must not return aliases.

    In eager mode a back-end may return such views.
    """
    seen: set[int] = set()
    out: list[Tensor] = []
    for tensor in outputs:
        storage = tensor.untyped_storage().data_ptr()
        out.append(tensor.clone() if storage in seen and storage else tensor)
        seen.add(storage)
    return tuple(out)


@torch.library.custom_op("headway::policy_loss", mutates_args=())
def _policy_loss(
    logp: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    segments: Tensor | None,
    reference: Tensor | None,
    proximal: Tensor | None,
    entropy: Tensor | None,
    m2_limit: Tensor | None,
    objective: str,
    first_index: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = loss_module.policy_loss(
        logp, behaviour, advantage, token_weight, segments=segments, reference=reference, proximal=proximal,
        entropy=entropy, m2_limit=m2_limit, objective=Objective.from_text(objective), first_index=first_index,
        backend=backend,
    )  # fmt: skip
    loss, coefficient, *stats = apart(
        out.loss, out.coefficient, out.stats.sums, out.stats.peaks, out.stats.buckets
    )
    return loss, coefficient, stats[0], stats[1], stats[2]


@_policy_loss.register_fake
def _(logp: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    coefficient = torch.empty_like(logp, dtype=torch.promote_types(logp.dtype, torch.float32))
    return (logp.new_empty((), dtype=torch.float64), coefficient, *stats_like(logp))


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
    m2_limit: Tensor | None = None,
    first_index: int = 0,
    backend: str = "auto",
) -> PolicyLoss:
    """policy_loss.policy_loss through its custom op."""
    loss, coefficient, *stats = _policy_loss(
        logp, behaviour, advantage, token_weight, segments, reference, proximal, entropy, m2_limit,
        objective.to_text(), first_index, backend,
    )  # fmt: skip
    return PolicyLoss(loss, coefficient, PolicyStats(*stats))


@torch.library.custom_op("headway::segment_scan", mutates_args=())
def _segment_scan(
    kind: str,
    rewards: Tensor,
    segments: Tensor,
    values: Tensor | None,
    log_ratio: Tensor | None,
    mask: Tensor | None,
    bootstrap: Tensor | None,
    gamma: float,
    lam: float,
    rho_cap: float,
    c_cap: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    out = scan_module.segment_scan(
        kind, rewards, segments, values=values, log_ratio=log_ratio, mask=mask, bootstrap=bootstrap,  # type: ignore[arg-type]
        gamma=gamma, lam=lam, rho_cap=rho_cap, c_cap=c_cap, backend=backend,
    )  # fmt: skip
    advantage, target = apart(out.advantage, out.target)
    return advantage, target


@_segment_scan.register_fake
def _(kind: str, rewards: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    return torch.empty_like(rewards, dtype=dtype), torch.empty_like(rewards, dtype=dtype)


def segment_scan(
    kind: scan_module.ScanKind,
    rewards: Tensor,
    segments: Tensor,
    *,
    values: Tensor | None = None,
    log_ratio: Tensor | None = None,
    mask: Tensor | None = None,
    bootstrap: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_cap: float = 1.0,
    c_cap: float = 1.0,
    backend: str = "auto",
) -> SegmentScan:
    """segment_scan.segment_scan through its custom op."""
    return SegmentScan(
        *_segment_scan(
            kind, rewards, segments, values, log_ratio, mask, bootstrap, gamma, lam, rho_cap, c_cap, backend
        )
    )
