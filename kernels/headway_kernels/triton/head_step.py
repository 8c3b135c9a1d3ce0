"""head_loss_step in Triton: chunks of fp32 logits by the vendor's GEMM, row kernels, two gradient products.

Token-level objectives take one kernel a chunk between the products, and wait for the device nowhere. Objectives
over segments, m2po without a limit and a vocabulary split over ranks go through head_step.run_step, which scores
rows before it evaluates them; so two kernels a chunk.

A row without a coefficient or an entropy term takes part with zeros in both operands, so nothing in it, finite or
not, reaches a gradient. It costs its share of the products: leaving it out of them would wait for the device.

Legend: T rows, N rows of a chunk, V vocabulary, H hidden.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway_kernels.head_results import HeadLoss
from headway_kernels.head_shard import VocabShard
from headway_kernels.head_step import Gradients, PolicyRows, RowScores, even_pieces, run_step
from headway_kernels.objective import Objective
from headway_kernels.triton.head_rows import (
    MAX_REGISTERS,
    NUM_WARPS,
    block_of,
    gradient_rows,
    loss_rows,
    score_rows,
)
from headway_kernels.triton.launch import bounds_of, codes_of, lacks_device, lacks_dtype, on_device
from headway_kernels.triton.policy_loss import PER_TOKEN, triton_policy_loss
from headway_kernels.triton.products import add_weight_gradient, full_precision, input_gradient, logits_into

# Rows of the logits start at multiples of 64 bytes, whatever V is: loads and products stay vectorised.
ALIGNMENT = 16


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    """The head and the rows of a call; all on one device.

    Attributes:
        x: [T, H]; weight: [V, H]; target: int64 [T]; inv_temperature: float [T]; bias: [V] or None.
        softcap: 1.0 where has_softcap is False. scale: factor of the logits. first_column: id of weight's first row.
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    inv_temperature: Tensor
    bias: Tensor | None
    scale: float
    softcap: float
    has_softcap: bool
    first_column: int

    @property
    def vocabulary(self) -> int:
        """Columns of the logits at hand."""
        return self.weight.shape[0]

    @property
    def block(self) -> int:
        """Columns of a block of the row kernels."""
        return block_of(self.vocabulary, has_bias=self.bias is not None)


class TritonChunk:
    """A reused buffer of fp32 logits, and the kernels over its rows (a head_step.Chunk)."""

    def __init__(self, head: _Head, chunk_bytes: int, shard: VocabShard | None) -> None:
        self._head, self._shard = head, shard
        self._stride = -(-head.vocabulary // ALIGNMENT) * ALIGNMENT
        fitting = max(1, chunk_bytes // (self._stride * 4))
        self.num_rows = fitting if shard is None else shard.smallest(fitting, head.x.device)
        held_rows = min(self.num_rows, max(head.x.shape[0], 1))
        self._products = torch.empty(held_rows, self._stride, dtype=torch.float32, device=head.x.device)
        half = head.x.dtype is torch.bfloat16
        whole = self._products.view(torch.bfloat16) if half else self._products
        # In bf16 the upper half of each row's bytes; see head_rows.
        self._gradient = whole[:, self._stride :] if half else whole
        self._live = torch.empty(held_rows, dtype=torch.int8, device=head.x.device)
        self._held: _Held | None = None

    def pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """The rows [start, end) as spans that fit the buffer."""
        return even_pieces(start, end, self.num_rows)

    def evaluate(
        self, start: int, end: int, policy: PolicyRows, out: RowScores, gradients: Gradients
    ) -> None:
        """Scores these rows, applies a token-level objective to them and adds their gradients."""
        head, rows = self._head, slice(start, end)
        self._multiply(rows)
        columns = (policy.behaviour, policy.advantage, policy.token_weight, policy.reference, policy.proximal)
        tokens = tuple(None if column is None else column[rows] for column in columns)
        loss_rows[(end - start,)](  # pyright: ignore[reportIndexIssue]
            self._products, self._gradient, self._products.stride(0), self._gradient.stride(0), head.vocabulary,
            head.bias, head.target[rows], head.inv_temperature[rows], head.scale, head.softcap,
            tokens, policy.m2_limit, bounds_of(policy.objective), out.logp, out.entropy, self._live,
            HAS_SOFTCAP=head.has_softcap, ENTROPY_TERM=policy.objective.entropy_coef != 0, BLOCK=head.block,
            num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS, **codes_of(policy.objective),
        )  # fmt: skip
        self._add_products(rows, gradients)

    def score(self, start: int, end: int, out: RowScores) -> None:
        """Computes the scores of these rows into `out` and keeps their logits."""
        head, rows = self._head, slice(start, end)
        self._multiply(rows)
        parts = torch.empty(end - start, 4, device=head.x.device)
        score_rows[(end - start,)](  # pyright: ignore[reportIndexIssue]
            self._products, self._products.stride(0), head.vocabulary, head.bias, head.target[rows],
            head.inv_temperature[rows], head.scale, head.softcap, head.first_column, parts,
            HAS_SOFTCAP=head.has_softcap, BLOCK=head.block, num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        self._held = _merge(parts, self._shard, start, end, out)

    def accumulate(self, coefficient: Tensor, entropy_weight: Tensor | None, out: Gradients) -> None:
        """Adds the gradients of the rows at hand, as head_step.Chunk says."""
        assert self._held is not None, "accumulate() follows score()"
        held, self._held, head = self._held, None, self._head
        rows = slice(held.start, held.end)
        with_entropy = entropy_weight is not None
        gradient_rows[(held.end - held.start,)](  # pyright: ignore[reportIndexIssue]
            self._products, self._gradient, self._products.stride(0), self._gradient.stride(0), head.vocabulary,
            head.bias, head.target[rows], head.inv_temperature[rows], head.scale, head.softcap, head.first_column,
            (held.peak, held.total, held.miss, held.logp, held.entropy if with_entropy else None),
            coefficient, entropy_weight, self._live,
            HAS_SOFTCAP=head.has_softcap, BLOCK=head.block, num_warps=NUM_WARPS, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        self._add_products(rows, out)

    def _multiply(self, rows: slice) -> None:
        head = self._head
        logits_into(head.x[rows], head.weight, self._products[: rows.stop - rows.start, : head.vocabulary])

    def _add_products(self, rows: slice, out: Gradients) -> None:
        head, num_rows = self._head, rows.stop - rows.start
        gradient_NV = self._gradient[:num_rows, : head.vocabulary]
        live = self._live[:num_rows, None] != 0
        out.x[rows].copy_(input_gradient(gradient_NV, head.weight))
        if out.weight is not None:
            # 0 times what is not finite would reach every row of the sum.
            add_weight_gradient(gradient_NV, torch.where(live, head.x[rows], 0.0), out.weight)
        if out.bias is not None:
            out.bias.add_(gradient_NV.sum(0, dtype=torch.float32))


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """The rows whose logits the buffer holds; [N] fp32 each, over the whole vocabulary."""

    start: int
    end: int
    peak: Tensor
    total: Tensor
    miss: Tensor
    logp: Tensor
    entropy: Tensor


def _merge(parts: Tensor, shard: VocabShard | None, start: int, end: int, out: RowScores) -> _Held:
    """The rows' scores from score_rows' parts, in fp64 until they are stored."""
    peak, rest, dot, picked = parts.unbind(1)
    shift = (picked - peak).double().clamp(min=-1e4)
    own = shift.exp()
    rest = rest.double()
    total, dots = rest + own, dot.double() + own * shift
    if shard is None:
        miss = rest / total
        log_total = total.log()
        logp = (picked - peak).double() - log_total
    else:
        merged = shard.merge(peak, total, dots, picked)
        peak, total, dots = merged.peak, merged.sums, merged.dots
        log_total = total.log()
        logp = (merged.picked - peak).double() - log_total
        miss = -torch.expm1(logp)
    entropy = (log_total - dots / total).float()
    out.logp.copy_(logp)
    out.logsumexp.copy_(log_total + peak)
    if out.entropy is not None:
        out.entropy.copy_(entropy)
    return _Held(start, end, peak.contiguous(), total.float(), miss.float(), logp.float(), entropy)


def lacks(arguments: Mapping[str, Any]) -> str | None:
    """What the kernels lack for a call of head_loss_step."""
    return (
        lacks_device({**arguments, "shard": None})
        or lacks_dtype(arguments, ("x", "weight"), (torch.bfloat16, torch.float32))
        or lacks_dtype(
            arguments, ("bias", "inv_temperature", *PER_TOKEN), (torch.float32, torch.bfloat16, torch.float16)
        )
    )


def triton_head_loss_step(
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
    """head_loss_step, whose arguments these are, checked. A value that is not finite is counted in the statistics
    and makes loss and gradients NaN."""
    with torch.no_grad(), on_device(x), full_precision():
        head = _Head(
            x, weight, target.contiguous(), inv_temperature.contiguous(), None if bias is None else bias.contiguous(),
            1.0 if logit_scale is None else logit_scale, 1.0 if softcap is None else softcap, softcap is not None,
            0 if shard is None else shard.start,
        )  # fmt: skip
        columns = (behaviour, advantage, token_weight, reference, proximal)
        mu, gain, weights, ref, prox = (None if column is None else column.contiguous() for column in columns)
        assert mu is not None
        assert gain is not None
        assert weights is not None
        policy = PolicyRows(mu, gain, weights, segments, objective, ref, prox, m2_limit, triton_policy_loss)
        chunk = TritonChunk(head, chunk_bytes, shard)
        num_rows = x.shape[0]
        with_entropy = want_entropy or objective.entropy_coef != 0
        scores = RowScores.empty(num_rows, torch.float32, x.device, with_entropy=with_entropy)
        # Parts of dL/dx are added up over the ranks before they are rounded.
        x_grad = torch.zeros(x.shape, dtype=torch.float32 if shard else x.dtype, device=x.device)
        gradients = Gradients(x_grad, weight_grad, bias_grad)
        if (
            shard is None
            and not objective.is_segment_level
            and not (objective.needs_m2_limit and m2_limit is None)
        ):
            for start, end in chunk.pieces(0, num_rows) if num_rows else ():
                chunk.evaluate(start, end, policy, scores.rows(start, end), gradients)
            result = policy.evaluate(scores, 0, num_rows, [])
            loss, stats = result.loss, result.stats
        else:
            loss, stats = run_step(chunk, policy, scores, gradients)
        if shard is not None:
            shard.sum_over_ranks(x_grad)
        return HeadLoss(loss, x_grad.to(x.dtype), scores.logp, scores.entropy, stats)
