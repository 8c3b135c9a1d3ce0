"""The reference back-end of head_logp and head_loss_step: plain PyTorch, a chunk of logits at a time.

The arguments are the public functions', checked; see head.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway_kernels.head_results import HeadLogp, HeadLoss
from headway_kernels.head_rows import Head, LogitChunk, RowInputs
from headway_kernels.head_shard import VocabShard
from headway_kernels.head_step import Gradients, PolicyRows, RowScores, run_step
from headway_kernels.objective import Objective
from headway_kernels.policy_reference import reference_policy_loss


def reference_head_logp(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    inv_temperature: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float | None,
    shard: VocabShard | None,
    chunk_bytes: int,
) -> HeadLogp:
    """head_logp."""
    with torch.no_grad():
        head = Head.prepare(weight, bias, softcap, logit_scale)
        chunk = LogitChunk(head, RowInputs(x, target, inv_temperature), chunk_bytes, shard)
        out = RowScores.empty(x.shape[0], head.dtype, x.device, with_entropy=True)
        for start, end in chunk.pieces(0, x.shape[0]):
            chunk.score(start, end, out.rows(start, end))
        assert out.entropy is not None
        return HeadLogp(out.logp, out.logsumexp, out.entropy)


def reference_head_loss_step(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    inv_temperature: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    segments: Tensor | None,
    objective: Objective,
    reference: Tensor | None,
    proximal: Tensor | None,
    m2_limit: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float | None,
    shard: VocabShard | None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None,
    chunk_bytes: int,
    want_entropy: bool,
) -> HeadLoss:
    """head_loss_step."""
    with torch.no_grad():
        head = Head.prepare(weight, bias, softcap, logit_scale)
        chunk = LogitChunk(head, RowInputs(x, target, inv_temperature), chunk_bytes, shard)
        policy = PolicyRows(
            behaviour, advantage, token_weight, segments, objective, reference, proximal, m2_limit,
            reference_policy_loss,
        )  # fmt: skip
        with_entropy = want_entropy or objective.entropy_coef != 0
        scores = RowScores.empty(x.shape[0], head.dtype, x.device, with_entropy=with_entropy)
        # Parts of dL/dx are added up over the ranks before they are rounded.
        x_grad = torch.zeros(x.shape, dtype=head.dtype if shard else x.dtype, device=x.device)
        loss, stats = run_step(chunk, policy, scores, Gradients(x_grad, weight_grad, bias_grad))
        if shard is not None:
            shard.sum_over_ranks(x_grad)
        return HeadLoss(loss, x_grad.to(x.dtype), scores.logp, scores.entropy, stats)
