"""The head's ops as torch custom ops; see tracing.py. A vocabulary shard cannot be traced and is refused."""

from __future__ import annotations

import typing
from typing import Any

import torch
from torch import Tensor

from headway_kernels import head as head_module
from headway_kernels import head_masked as masked_module
from headway_kernels.errors import UnsupportedOption
from headway_kernels.head_results import CHUNK_BYTES, HeadLogp, HeadLoss, compute_dtype
from headway_kernels.head_shard import VocabShard
from headway_kernels.objective import Objective
from headway_kernels.policy_ops import apart, stats_like
from headway_kernels.policy_stats import PolicyStats

# loss, x_grad, logp, entropy (empty if not wanted), sums, peaks, buckets
LossTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _refuse_shard(op: str, shard: VocabShard | None) -> None:
    if shard is not None:
        raise UnsupportedOption(f"{op}: a vocabulary shard cannot be traced; call it outside torch.compile")


def _unpack(out: HeadLoss) -> LossTensors:
    entropy = out.logp.new_empty(0) if out.entropy is None else out.entropy
    stats = out.stats
    outputs = apart(out.loss, out.x_grad, out.logp, entropy, stats.sums, stats.peaks, stats.buckets)
    return typing.cast(LossTensors, outputs)


def _pack(tensors: LossTensors, with_entropy: bool) -> HeadLoss:
    loss, x_grad, logp, entropy, *stats = tensors
    return HeadLoss(loss, x_grad, logp, entropy if with_entropy else None, PolicyStats(*stats))


def _fake_loss(x: Tensor, with_entropy: bool) -> LossTensors:
    logp = x.new_empty(x.shape[0], dtype=compute_dtype(x))
    entropy = torch.empty_like(logp) if with_entropy else logp.new_empty(0)
    x_grad = torch.empty_like(x, memory_format=torch.contiguous_format)
    return (x.new_empty((), dtype=torch.float64), x_grad, logp, entropy, *stats_like(x))


def _fake_logp(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logp = x.new_empty(x.shape[0], dtype=compute_dtype(x))
    return logp, torch.empty_like(logp), torch.empty_like(logp)


@torch.library.custom_op("headway::head_logp", mutates_args=())
def _head_logp(
    x: Tensor, weight: Tensor, target: Tensor, inv_temperature: Tensor, bias: Tensor | None,
    softcap: float | None, logit_scale: float | None, chunk_bytes: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = head_module.head_logp(
        x, weight, target, inv_temperature=inv_temperature, bias=bias, softcap=softcap, logit_scale=logit_scale,
        chunk_bytes=chunk_bytes, backend=backend,
    )  # fmt: skip
    logp, logsumexp, entropy = apart(*out)
    return logp, logsumexp, entropy


@_head_logp.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_logp(x)


def head_logp(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    inv_temperature: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    shard: VocabShard | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    backend: str = "auto",
) -> HeadLogp:
    """head.head_logp through its custom op."""
    _refuse_shard("head_logp", shard)
    return HeadLogp(
        *_head_logp(x, weight, target, inv_temperature, bias, softcap, logit_scale, chunk_bytes, backend)
    )


@torch.library.custom_op("headway::head_loss_step", mutates_args=("weight_grad", "bias_grad"))
def _head_loss_step(
    x: Tensor, weight: Tensor, target: Tensor, inv_temperature: Tensor, behaviour: Tensor, advantage: Tensor,
    token_weight: Tensor, segments: Tensor | None, reference: Tensor | None, proximal: Tensor | None,
    m2_limit: Tensor | None, bias: Tensor | None, weight_grad: Tensor | None, bias_grad: Tensor | None,
    objective: str, softcap: float | None, logit_scale: float | None, chunk_bytes: int, want_entropy: bool,
    backend: str,
) -> LossTensors:  # fmt: skip
    return _unpack(
        head_module.head_loss_step(
            x, weight, target, inv_temperature=inv_temperature, behaviour=behaviour, advantage=advantage,
            token_weight=token_weight, segments=segments, reference=reference, proximal=proximal,
            m2_limit=m2_limit, bias=bias, weight_grad=weight_grad, bias_grad=bias_grad,
            objective=Objective.from_text(objective), softcap=softcap, logit_scale=logit_scale,
            chunk_bytes=chunk_bytes, want_entropy=want_entropy, backend=backend,
        )
    )  # fmt: skip


@_head_loss_step.register_fake
def _(x: Tensor, *rest: Any) -> LossTensors:
    objective, want_entropy = Objective.from_text(rest[-6]), rest[-2]
    return _fake_loss(x, want_entropy or objective.entropy_coef != 0)


def head_loss_step(
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
    reference: Tensor | None = None,
    proximal: Tensor | None = None,
    m2_limit: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    shard: VocabShard | None = None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    want_entropy: bool = True,
    backend: str = "auto",
) -> HeadLoss:
    """head.head_loss_step through its custom op."""
    _refuse_shard("head_loss_step", shard)
    tensors = _head_loss_step(
        x, weight, target, inv_temperature, behaviour, advantage, token_weight, segments, reference, proximal,
        m2_limit, bias, weight_grad, bias_grad, objective.to_text(), softcap, logit_scale, chunk_bytes,
        want_entropy, backend,
    )  # fmt: skip
    return _pack(tensors, want_entropy or objective.entropy_coef != 0)


@torch.library.custom_op("headway::head_masked", mutates_args=())
def _head_masked(
    x: Tensor, weight: Tensor, target: Tensor, offsets: Tensor, ids: Tensor, inv_temperature: Tensor,
    bias: Tensor | None, softcap: float | None, logit_scale: float | None, chunk_bytes: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = masked_module.head_masked(
        x, weight, target, offsets, ids, inv_temperature=inv_temperature, bias=bias, softcap=softcap,
        logit_scale=logit_scale, chunk_bytes=chunk_bytes, backend=backend,
    )  # fmt: skip
    logp, logsumexp, entropy = apart(*out)
    return logp, logsumexp, entropy


@_head_masked.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_logp(x)


def head_masked(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    offsets: Tensor,
    ids: Tensor,
    *,
    inv_temperature: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    backend: str = "auto",
) -> HeadLogp:
    """head_masked.head_masked through its custom op."""
    return HeadLogp(
        *_head_masked(
            x, weight, target, offsets, ids, inv_temperature, bias, softcap, logit_scale, chunk_bytes, backend
        )
    )


@torch.library.custom_op("headway::head_masked_loss_step", mutates_args=("weight_grad", "bias_grad"))
def _head_masked_loss_step(
    x: Tensor, weight: Tensor, target: Tensor, offsets: Tensor, ids: Tensor, inv_temperature: Tensor,
    behaviour: Tensor, advantage: Tensor, token_weight: Tensor, segments: Tensor | None,
    reference: Tensor | None, proximal: Tensor | None, m2_limit: Tensor | None, bias: Tensor | None,
    weight_grad: Tensor | None, bias_grad: Tensor | None, objective: str, softcap: float | None,
    logit_scale: float | None, chunk_bytes: int, want_entropy: bool, backend: str,
) -> LossTensors:  # fmt: skip
    return _unpack(
        masked_module.head_masked_loss_step(
            x, weight, target, offsets, ids, inv_temperature=inv_temperature, behaviour=behaviour,
            advantage=advantage, token_weight=token_weight, segments=segments, reference=reference,
            proximal=proximal, m2_limit=m2_limit, bias=bias, weight_grad=weight_grad, bias_grad=bias_grad,
            objective=Objective.from_text(objective), softcap=softcap, logit_scale=logit_scale,
            chunk_bytes=chunk_bytes, want_entropy=want_entropy, backend=backend,
        )
    )  # fmt: skip


@_head_masked_loss_step.register_fake
def _(x: Tensor, *rest: Any) -> LossTensors:
    objective, want_entropy = Objective.from_text(rest[-6]), rest[-2]
    return _fake_loss(x, want_entropy or objective.entropy_coef != 0)


def head_masked_loss_step(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    offsets: Tensor,
    ids: Tensor,
    *,
    inv_temperature: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    segments: Tensor | None,
    objective: Objective,
    reference: Tensor | None = None,
    proximal: Tensor | None = None,
    m2_limit: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    want_entropy: bool = True,
    backend: str = "auto",
) -> HeadLoss:
    """head_masked.head_masked_loss_step through its custom op."""
    tensors = _head_masked_loss_step(
        x, weight, target, offsets, ids, inv_temperature, behaviour, advantage, token_weight, segments,
        reference, proximal, m2_limit, bias, weight_grad, bias_grad, objective.to_text(), softcap, logit_scale,
        chunk_bytes, want_entropy, backend,
    )  # fmt: skip
    return _pack(tensors, want_entropy or objective.entropy_coef != 0)
