"""The reference back-end of head_masked and its loss step: gathered rows of the weight, softmax in fp64.

Legend: T rows, H hidden, V vocabulary, N rows at hand, K their kept ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from headway_kernels.head_results import HeadLogp, HeadLoss, compute_dtype
from headway_kernels.head_rows import RowInputs
from headway_kernels.head_step import Gradients, PolicyRows, RowScores, run_step
from headway_kernels.objective import Objective
from headway_kernels.policy_reference import reference_policy_loss


def reference_head_masked(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    offsets: Tensor,
    ids: Tensor,
    *,
    inv_temperature: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float | None,
    chunk_bytes: int,
) -> HeadLogp:
    """head_masked, whose arguments these are, checked."""
    with torch.no_grad():
        head = KeptHead(weight, bias, softcap, 1.0 if logit_scale is None else logit_scale, offsets, ids)
        chunk = KeptChunk(head, RowInputs(x, target, inv_temperature), chunk_bytes)
        out = RowScores.empty(x.shape[0], compute_dtype(weight), x.device, with_entropy=True)
        for start, end in chunk.pieces(0, x.shape[0]):
            chunk.score(start, end, out.rows(start, end))
        assert out.entropy is not None
        return HeadLogp(out.logp, out.logsumexp, out.entropy)


def reference_head_masked_loss_step(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    offsets: Tensor,
    ids: Tensor,
    *,
    inv_temperature: Tensor,
    token_weight: Tensor,
    objective: Objective,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float | None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None,
    chunk_bytes: int,
    want_entropy: bool,
    **policy_inputs: Any,
) -> HeadLoss:
    """head_masked_loss_step, whose arguments these are, checked."""
    with torch.no_grad():
        head = KeptHead(weight, bias, softcap, 1.0 if logit_scale is None else logit_scale, offsets, ids)
        chunk = KeptChunk(head, RowInputs(x, target, inv_temperature), chunk_bytes)
        policy = PolicyRows(
            token_weight=token_weight, objective=objective, function=reference_policy_loss, **policy_inputs
        )
        with_entropy = want_entropy or objective.entropy_coef != 0
        scores = RowScores.empty(x.shape[0], compute_dtype(weight), x.device, with_entropy=with_entropy)
        x_grad = torch.zeros_like(x, memory_format=torch.contiguous_format)
        loss, stats = run_step(chunk, policy, scores, Gradients(x_grad, weight_grad, bias_grad))
        return HeadLoss(loss, x_grad, scores.logp, scores.entropy, stats)


@dataclasses.dataclass(frozen=True, slots=True)
class KeptHead:
    """A head and the kept ids of every row, as head_masked takes them; scale: factor of the logits."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    scale: float
    offsets: Tensor
    ids: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """The rows at hand: first row; kept ids, their rows (of N) and rows of the weight; kept [K, H]; all else float64.

    Attributes:
        slope: [K], d(chain)/d(x w) of each kept id. probability, log_probability: [K]. onehot: bool [K].
        miss: [N], 1 - p(target) without cancellation. entropy: [N].
    """

    start: int
    end: int
    ids: Tensor
    row: Tensor
    kept: Tensor
    slope: Tensor
    probability: Tensor
    log_probability: Tensor
    onehot: Tensor
    miss: Tensor
    entropy: Tensor


class KeptChunk:
    """The kept logits of some of the rows (a head_step.Chunk)."""

    def __init__(self, head: KeptHead, inputs: RowInputs, chunk_bytes: int) -> None:
        self._head, self._inputs = head, inputs
        self._dtype = compute_dtype(head.weight)
        self._limit = max(1, chunk_bytes // (head.weight.shape[1] * self._dtype.itemsize))
        self._offsets: list[int] = head.offsets.tolist()
        self._held: _Held | None = None

    def pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """The rows [start, end) as spans whose kept ids fit the budget, at least one row each."""
        pieces: list[tuple[int, int]] = []
        low = start
        for row in range(start, end):
            if row > low and self._offsets[row + 1] - self._offsets[low] > self._limit:
                pieces.append((low, row))
                low = row
        return [*pieces, (low, end)] if end > low else pieces

    def score(self, start: int, end: int, out: RowScores) -> None:
        """Computes the scores of these rows into `out` and keeps their probabilities."""
        head, inputs, num_rows = self._head, self._inputs, end - start
        ids = head.ids[self._offsets[start] : self._offsets[end]]
        row = torch.repeat_interleave(head.offsets[start : end + 1].diff())
        kept_KH = head.weight[ids].to(self._dtype)
        x_KH = inputs.x[start:end].to(self._dtype)[row]
        z, slope = self._chain(torch.linalg.vecdot(x_KH, kept_KH).to(torch.float64), ids)
        inverse = inputs.inv_temperature[start:end].to(torch.float64)[row]
        z, slope = z * inverse, slope * inverse
        peak = torch.full((num_rows,), -torch.inf, dtype=torch.float64, device=z.device)
        peak.scatter_reduce_(0, row, z, "amax")
        below = z - peak[row]
        log_sum = _sum(below.exp(), row, num_rows).log()
        log_probability = below - log_sum[row]
        probability = log_probability.exp()
        entropy = -_sum(torch.where(probability > 0, probability * log_probability, 0.0), row, num_rows)
        onehot = ids == inputs.target[start:end][row]
        logp = _sum(torch.where(onehot, log_probability, 0.0), row, num_rows)
        out.logp.copy_(logp)
        out.logsumexp.copy_(log_sum + peak)
        if out.entropy is not None:
            out.entropy.copy_(entropy)
        self._held = _Held(
            start, end, ids, row, kept_KH, slope, probability, log_probability, onehot, -torch.expm1(logp), entropy
        )  # fmt: skip

    def _chain(self, z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Bias, scale and softcap: the logits before the temperature, and their slope by x w."""
        head = self._head
        if head.bias is not None:
            z = z + head.bias[ids].to(torch.float64)
        z = z * head.scale
        if head.softcap is None:
            return z, torch.full_like(z, head.scale)
        z = z / head.softcap
        # tanh' as 1 / cosh^2: 1 - tanh^2 has no digits left where the softcap saturates.
        return torch.tanh(z) * head.softcap, torch.cosh(z).reciprocal().square() * head.scale

    def accumulate(self, coefficient: Tensor, entropy_weight: Tensor | None, out: Gradients) -> None:
        """Adds the gradients of the rows at hand, as head_step.Chunk says."""
        assert self._held is not None, "accumulate() follows score()"
        held, self._held = self._held, None
        live = coefficient != 0
        if entropy_weight is not None:
            live = live | (entropy_weight != 0)
        used = live[held.row]
        if not bool(used.any()):
            return
        row, ids, kept_KH = held.row[used], held.ids[used], held.kept[used]
        probability, slope = held.probability[used], held.slope[used]
        # 1 - p(target) has no cancellation in `miss`.
        residual = torch.where(held.onehot[used], held.miss[row], -probability)
        gradient = coefficient.to(torch.float64)[row] * residual
        if entropy_weight is not None:
            log_probability = torch.where(probability > 0, held.log_probability[used], 0.0)
            gradient += (
                entropy_weight.to(torch.float64)[row] * probability * (log_probability + held.entropy[row])
            )
        gradient = (gradient * slope).to(self._dtype)
        x_NH = self._inputs.x[held.start : held.end].to(self._dtype)
        x_grad_NH = torch.zeros_like(x_NH).index_add_(0, row, gradient[:, None] * kept_KH)
        out.x[held.start : held.end].copy_(x_grad_NH)
        if out.weight is not None:
            out.weight.index_add_(0, ids, gradient[:, None] * x_NH[row])
        if out.bias is not None:
            out.bias.index_add_(0, ids, gradient)


def _sum(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    return torch.zeros(num_rows, dtype=torch.float64, device=values.device).index_add_(0, row, values)
