"""policy_loss on CUDA: csrc/cuda/policy_loss.cu. Called through the registry, which has checked the arguments.

Legend: T tokens (packed), S segments.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headway_kernels.cuda.library import PolicyOptions, library
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import PolicyLoss, check_segments
from headway_kernels.policy_reference import second_moment_limit
from headway_kernels.policy_stats import NUM_BUCKETS, SUMS, PolicyStats

_NUM_PEAKS = 3
_NUM_RESULTS = 1 + len(SUMS) + _NUM_PEAKS + NUM_BUCKETS


def cuda_policy_loss(
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
    """policy_loss in fp32, without a host sync unless the segments are on the GPU.

    A weighted token whose input is not finite is counted in the statistics and makes its coefficient and the loss NaN.
    """
    lib = library()
    options = options_of(objective)
    num_tokens, num_segments = logp.shape[0], 0
    offsets = None
    if objective.is_segment_level:
        assert segments is not None
        check_segments(segments, num_tokens)
        num_segments, offsets = segments.shape[0] - 1, segments.to(logp.device).contiguous()
    limit = None
    if objective.needs_m2_limit:
        if m2_limit is None:
            m2_limit = second_moment_limit(logp.double() - behaviour.double(), token_weight != 0, objective)
        limit = m2_limit.to(logp.device, torch.float64)
    rows = lib.policy_rows(options, num_tokens, num_segments)
    assert lib.policy_columns() == _NUM_RESULTS
    coefficient = torch.empty_like(logp, dtype=torch.float32, memory_format=torch.contiguous_format)
    partials = logp.new_empty(_NUM_RESULTS * rows, dtype=torch.float32)
    results = logp.new_empty(_NUM_RESULTS, dtype=torch.float64)
    inputs = [
        None if each is None else each.float().contiguous()
        for each in (logp, behaviour, advantage, token_weight, proximal, reference, entropy)
    ]
    lib.call(
        "policy_loss",
        logp.device,
        options,
        *inputs,
        limit,
        offsets,
        num_tokens,
        num_segments,
        coefficient,
        partials,
        results,
    )
    loss, sums, peaks, buckets = results.split([1, len(SUMS), _NUM_PEAKS, NUM_BUCKETS])
    return PolicyLoss(loss[0], coefficient, PolicyStats(sums, peaks, buckets))


def options_of(objective: Objective) -> PolicyOptions:
    """The objective as the kernel reads it."""
    return PolicyOptions(
        family=int(objective.family),
        correction=int(objective.correction_code),
        kl=int(objective.kl_code),
        ratio_level=int(objective.ratio_level),
        rho_level=int(objective.rho_level),
        clip_lower=1.0 - objective.clip_low,
        clip_upper=1.0 + objective.clip_high,
        dual_clip=math.inf if objective.dual_clip is None else objective.dual_clip,
        cap=objective.cap,
        correction_cap=objective.correction_cap,
        correction_floor=objective.correction_floor,
        gate_positive=objective.gate_positive,
        gate_negative=objective.gate_negative,
        tv_bound=objective.tv_bound,
        kl_coef=objective.kl_coef,
        entropy_coef=objective.entropy_coef,
    )
