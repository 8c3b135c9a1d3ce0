"""The language-model head: log-probs of given targets, and the policy loss with both gradients in one pass.

head_loss_step forms the gradients while the logits of a chunk are at hand: three matrix products (logits, dX,
dW) instead of the four of a head that recomputes its logits in the backward, and never a tensor of T x V
elements. The reference back-end is plain PyTorch; other back-ends come behind the same functions.

Chain of a row, in this order: linear (with bias), logit scale, softcap, inverse temperature, log-softmax.

Legend: T rows (loss tokens), H hidden, V vocabulary, S segments, N rows of a chunk.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headway_kernels.errors import BackendUnavailable, ShapeError, UnsupportedOption
from headway_kernels.head_rows import Head, LogitChunk, RowScores
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import PolicyLoss, check_policy_inputs, check_segments, policy_loss
from headway_kernels.policy_stats import PolicyStats

CHUNK_BYTES = 64 << 20
_PLANNED_BACKENDS = ("triton", "cuda", "cpu")


class HeadLogp(NamedTuple):
    """Log-prob of the target, logsumexp and entropy; each float32 [T], float64 for float64 inputs."""

    logp: Tensor
    logsumexp: Tensor
    entropy: Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeadLoss:
    """What head_loss_step returns.

    Attributes:
        loss: float64 scalar.
        x_grad: [T, H] in x's dtype, dL/dx, rounded once; exactly 0 on rows without a loss term.
        logp: float32 [T], of the target at its temperature.
        entropy: float32 [T]; None if not wanted.
        stats: statistics over the weighted tokens.
    """

    loss: Tensor
    x_grad: Tensor
    logp: Tensor
    entropy: Tensor | None
    stats: PolicyStats


def head_logp(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    inv_temperature: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    backend: str = "auto",
) -> HeadLogp:
    """Log-prob of the targets, logsumexp and entropy, streamed over chunks of rows; no gradient.

    Args:
        x: [T, H] float; weight: [V, H] of the same dtype; bias: [V].
        target: int64 [T] in [0, V).
        inv_temperature: float [T], 1 / temperature of each row.
        softcap: c of c tanh(z / c); logit_scale: factor of the logits, before the softcap.
        chunk_bytes: budget of the logits held at once; at least one row is.
        backend: "auto" | "reference".

    Returns:
        HeadLogp. Temperature is applied before the softmax: all three are of the tempered distribution.

    Raises:
        ShapeError: shapes, dtypes or a target out of range.
        UnsupportedOption, BackendUnavailable: an unknown or missing back-end.
    """
    choose_backend("head_logp", backend)
    with torch.no_grad():
        head = _check(x, weight, target, inv_temperature, bias, softcap, logit_scale)
        out = RowScores.empty(x.shape[0], head.dtype, x.device, with_entropy=True)
        chunk = LogitChunk(head, x.shape[0], chunk_bytes)
        for start, end in _even_spans(0, x.shape[0], chunk.num_rows):
            chunk.score(x[start:end], target[start:end], inv_temperature[start:end], out.rows(start, end))
        assert out.entropy is not None
        return HeadLogp(out.logp, out.logsumexp, out.entropy)


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
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    want_entropy: bool = True,
    backend: str = "auto",
) -> HeadLoss:
    """Loss, dL/dx, dL/dweight and statistics of the policy loss in one chunked pass; no autograd.

    Args:
        x, weight, target, inv_temperature, bias, softcap, logit_scale, chunk_bytes, backend: as in head_logp.
        behaviour, advantage, token_weight: float [T]; see policy_loss. token_weight holds the mask and
            1/denominator.
        segments: int64 [S + 1], offsets over the T rows; read by segment-level objectives only. Their chunks
            are unions of whole segments; a segment longer than a chunk is scored first, then computed again.
        objective: the loss; reference, proximal: float [T] where it needs them.
        weight_grad: float32 [V, H], dL/dweight is added to it; None: not computed.
        bias_grad: float32 [V], likewise.
        want_entropy: compute the entropy though the objective has no entropy term.

    Returns:
        HeadLoss. Loss and gradients do not depend on chunk_bytes beyond fp32 rounding.

    Raises:
        ShapeError, UnsupportedOption, BackendUnavailable: as in head_logp and policy_loss.
        NumericsError: a weighted token has a value that is not finite; weight_grad and bias_grad are then
            unusable.
    """
    choose_backend("head_loss_step", backend)
    check_policy_inputs(objective, behaviour, segments, reference, proximal, None)
    with torch.no_grad():
        head = _check(x, weight, target, inv_temperature, bias, softcap, logit_scale)
        _check_gradients(head, weight_grad, bias_grad)
        step = _Step(
            head=head,
            x=x,
            target=target,
            inv_temperature=inv_temperature,
            policy=_PolicyRows(behaviour, advantage, token_weight, segments, objective, reference, proximal),
            chunk=LogitChunk(head, x.shape[0], chunk_bytes),
            scores=RowScores.empty(
                x.shape[0], head.dtype, x.device, with_entropy=want_entropy or objective.entropy_coef != 0
            ),
            x_grad=torch.zeros_like(x, memory_format=torch.contiguous_format),
            weight_grad=weight_grad,
            bias_grad=bias_grad,
        )
        losses, stats = step.run()
        return HeadLoss(losses, step.x_grad, step.scores.logp, step.scores.entropy, stats)


@dataclasses.dataclass(frozen=True, slots=True)
class _PolicyRows:
    """The policy loss of row ranges of one step."""

    behaviour: Tensor
    advantage: Tensor
    token_weight: Tensor
    segments: Tensor | None
    objective: Objective
    reference: Tensor | None
    proximal: Tensor | None

    def evaluate(self, scores: RowScores, start: int, end: int, boundaries: list[int]) -> PolicyLoss:
        segments = None
        if self.segments is not None and self.objective.is_segment_level:
            first, last = bisect.bisect_left(boundaries, start), bisect.bisect_right(boundaries, end)
            segments = self.segments[first:last] - start
        part = scores.rows(start, end)
        return policy_loss(
            part.logp,
            self.behaviour[start:end],
            self.advantage[start:end],
            self.token_weight[start:end],
            objective=self.objective,
            segments=segments,
            reference=None if self.reference is None else self.reference[start:end],
            proximal=None if self.proximal is None else self.proximal[start:end],
            entropy=part.entropy,
            first_index=start,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One head_loss_step in progress."""

    head: Head
    x: Tensor
    target: Tensor
    inv_temperature: Tensor
    policy: _PolicyRows
    chunk: LogitChunk
    scores: RowScores
    x_grad: Tensor
    weight_grad: Tensor | None
    bias_grad: Tensor | None

    def run(self) -> tuple[Tensor, PolicyStats]:
        num_rows, limit = self.x.shape[0], self.chunk.num_rows
        boundaries: list[int] = []
        spans = _even_spans(0, num_rows, limit)
        if self.policy.objective.is_segment_level:
            assert self.policy.segments is not None
            boundaries = check_segments(self.policy.segments, num_rows)
            spans = _segment_spans(boundaries, limit)
        loss, stats = None, None
        for start, end in spans:
            pieces = list(_even_spans(start, end, limit))
            for piece in pieces:
                self._score(*piece)
            result = self.policy.evaluate(self.scores, start, end, boundaries)
            for piece in pieces:
                if len(pieces) > 1:  # the segment outgrew the chunk: its logits are computed a second time
                    self._score(*piece)
                low, high = piece
                self._accumulate(low, high, result.coefficient[low - start : high - start])
            loss = result.loss if loss is None else loss + result.loss
            stats = result.stats if stats is None else stats + result.stats
        if loss is None or stats is None:
            return torch.zeros((), dtype=torch.float64, device=self.x.device), PolicyStats.zero(self.x.device)
        return loss, stats

    def _score(self, start: int, end: int) -> None:
        self.chunk.score(
            self.x[start:end],
            self.target[start:end],
            self.inv_temperature[start:end],
            self.scores.rows(start, end),
        )

    def _accumulate(self, start: int, end: int, coefficient: Tensor) -> None:
        """Adds the gradients of the rows [start, end), whose exponentials the chunk holds."""
        entropy_coef = self.policy.objective.entropy_coef
        entropy_weight = None
        if entropy_coef:
            entropy_weight = self.policy.token_weight[start:end].to(torch.float64) * entropy_coef
        self.chunk.accumulate(
            coefficient,
            entropy_weight,
            x_grad=self.x_grad[start:end],
            weight_grad=self.weight_grad,
            bias_grad=self.bias_grad,
        )


def choose_backend(op: str, backend: str) -> str:
    """The back-end that runs `op`.

    Raises:
        BackendUnavailable: a known back-end that this build lacks.
        UnsupportedOption: no such back-end.
    """
    if backend in ("auto", "reference"):
        return "reference"
    if backend in _PLANNED_BACKENDS:
        raise BackendUnavailable(f"{op} has no {backend} back-end in this build; use 'auto' or 'reference'")
    raise UnsupportedOption(f"{op}: backend {backend!r} is unknown; choose 'auto' or 'reference'")


def _check(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    inv_temperature: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float | None,
) -> Head:
    """Checks what both functions take and prepares the head in the compute dtype."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ShapeError(
            "x must be [T, H] and weight [V, H] of one dtype, got "
            f"{list(x.shape)} {x.dtype} and {list(weight.shape)} {weight.dtype}"
        )
    rows, vocabulary = x.shape[0], weight.shape[0]
    if not x.dtype.is_floating_point or vocabulary == 0:
        raise ShapeError(f"x must be floating point and V at least 1, got {x.dtype} and V = {vocabulary}")
    for name, tensor in (("target", target), ("inv_temperature", inv_temperature)):
        if tensor.shape != (rows,):
            raise ShapeError(f"{name} must be [T] = [{rows}], got {list(tensor.shape)}")
    if target.dtype != torch.int64:
        raise ShapeError(f"target must be int64, got {target.dtype}")
    if bias is not None and bias.shape != (vocabulary,):
        raise ShapeError(f"bias must be [V] = [{vocabulary}], got {list(bias.shape)}")
    if softcap is not None and not softcap > 0:
        raise UnsupportedOption(f"softcap must be above 0, or None for no softcap; got {softcap}")
    if rows:
        low, high = target.aminmax()
        if int(low) < 0 or int(high) >= vocabulary:
            raise ShapeError(f"target must be in [0, {vocabulary}), got {int(low)} to {int(high)}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    return Head(
        weight=weight.to(dtype),
        bias=None if bias is None else bias.to(dtype),
        softcap=softcap,
        scale=1.0 if logit_scale is None else logit_scale,
    )


def _check_gradients(head: Head, weight_grad: Tensor | None, bias_grad: Tensor | None) -> None:
    pairs = (("weight_grad", weight_grad, head.weight), ("bias_grad", bias_grad, head.bias))
    for name, gradient, value in pairs:
        if gradient is None:
            continue
        if value is None:
            raise ShapeError(f"{name} was given for a head without a bias; pass None")
        if gradient.shape != value.shape or gradient.dtype != head.dtype:
            raise ShapeError(
                f"{name} must be {head.dtype} {list(value.shape)}, "
                f"got {gradient.dtype} {list(gradient.shape)}"
            )


def _even_spans(start: int, end: int, limit: int) -> Iterator[tuple[int, int]]:
    """Splits [start, end) into the fewest spans of at most `limit` rows, as even as they come."""
    rows = end - start
    count = -(-rows // limit)
    for index in range(count):
        yield start + index * rows // count, start + (index + 1) * rows // count


def _segment_spans(boundaries: list[int], limit: int) -> Iterator[tuple[int, int]]:
    """Splits at segment borders into spans of at most `limit` rows; a longer segment is a span of its own."""
    start = 0
    while start < boundaries[-1]:
        end = boundaries[bisect.bisect_right(boundaries, start + limit) - 1]
        if end == start:
            end = boundaries[bisect.bisect_right(boundaries, start)]
        yield start, end
        start = end
