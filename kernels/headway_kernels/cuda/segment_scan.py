"""segment_scan on CUDA: csrc/cuda/segment_scan.cu. Called through the registry, which has checked the arguments.

Legend: T tokens (packed), S segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway_kernels.cuda.library import library
from headway_kernels.policy_loss import check_segments
from headway_kernels.segment_scan import KINDS, ScanKind, SegmentScan


def cuda_segment_scan(
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
    """segment_scan in fp32; an active input that is not finite makes the outputs of its segment before it NaN.

    Reads the offsets on the host (a sync where they are on the GPU: keep them on the CPU).
    """
    check_segments(segments, rewards.shape[0])
    floats = [
        None if each is None else each.float().contiguous()
        for each in (rewards, values, log_ratio, bootstrap)
    ]
    reward, value, ratio, after = floats
    assert reward is not None
    advantage, target = torch.empty_like(reward), torch.empty_like(reward)
    library().call(
        "segment_scan",
        rewards.device,
        KINDS.index(kind),
        reward,
        segments.to(rewards.device).contiguous(),
        value,
        ratio,
        None if mask is None else mask.contiguous(),
        after,
        segments.shape[0] - 1,
        gamma,
        lam,
        rho_cap,
        c_cap,
        advantage,
        target,
    )
    return SegmentScan(advantage, target)
