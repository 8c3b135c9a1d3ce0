"""The rows of one chunk of logits: scores in one sweep, gradients written in place of the logits.

head_step.py drives it: score(), then accumulate() while the chunk still holds the exponentials of those rows.

The sweeps work on blocks of rows that fit the cache, so that a chunk goes through memory once per matrix
product and twice for the softmax, not once per elementwise operation.

Legend: N rows of the chunk, B rows of a block, A rows that carry a gradient, V vocabulary, H hidden.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headway_kernels.head_results import compute_dtype
from headway_kernels.head_shard import MergedRows, VocabShard
from headway_kernels.head_step import Gradients, RowScores, even_pieces

# Half of a common L2: a block of logits and the scratch of the same size stay in the cache.
BLOCK_BYTES = 512 << 10
ACCELERATOR_BLOCK_BYTES = 16 << 20
# glibc serves blocks below 32 MiB from the heap once one was freed; freed there they fragment it. Chunks that
# come near are rounded up to be mapped; pages that are not touched cost nothing.
HEAP_LIMIT = 33 << 20
HEAP_SAFE = 8 << 20
# Of the vocabulary, in one product over it: its sums in fp32 stay short, and it is long enough for full speed.
COLUMNS_AT_ONCE = 4096
# Finite stand-in for -inf minus the row's maximum: its exponential is 0 and 0 times it is not NaN.
LOWEST = -1e4


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """A head in the compute dtype (float32, or float64 for float64 inputs).

    Attributes:
        weight: [V, H]; bias: [V] or None; softcap: c or None; scale: factor of the logits.
    """

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    scale: float

    @staticmethod
    def prepare(
        weight: Tensor, bias: Tensor | None, softcap: float | None, logit_scale: float | None
    ) -> Head:
        """A head from what the public functions take."""
        dtype = compute_dtype(weight)
        scale = 1.0 if logit_scale is None else logit_scale
        return Head(weight.to(dtype), None if bias is None else bias.to(dtype), softcap, scale)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.weight.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class RowInputs:
    """All rows of a call: x [T, H] in the caller's dtype; target int64 [T]; inv_temperature float [T]."""

    x: Tensor
    target: Tensor
    inv_temperature: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """The rows whose exponentials the chunk holds.

    Attributes:
        x: [N, H], the inputs; logits = factor (x weight^T + bias).
        start: of the first row, in the caller's numbering.
        target: [N], columns of `weight`; owned: bool [N], False where another rank holds the target's column;
            None: all are. factor: [N], the folded scale (and temperature, if there is no softcap).
        inv_temperature: [N], what a softcap's slope is still to be multiplied by.
        total: float64 [N], sum over the whole vocabulary of exp(z - max), max being that of the logits at hand
            (inf where those are all negligible); log_total: its log.
        miss: float64 [N], 1 - p(target), without cancellation.
        entropy: [N]; None unless it was asked for.
    """

    x: Tensor
    start: int
    target: Tensor
    owned: Tensor | None
    factor: Tensor
    inv_temperature: Tensor
    total: Tensor
    log_total: Tensor
    miss: Tensor
    entropy: Tensor | None


class LogitChunk:
    """A reused buffer for the logits of some of the rows; holds one set of them at a time (a head_step.Chunk)."""

    def __init__(
        self, head: Head, inputs: RowInputs, chunk_bytes: int, shard: VocabShard | None = None
    ) -> None:
        """Plans for these rows within `chunk_bytes` (one row at least); `shard` if the head is a part of one."""
        self._head, self._inputs, self._shard = head, inputs, shard
        device, vocabulary = head.weight.device, head.weight.shape[0]
        row_bytes = vocabulary * head.dtype.itemsize
        num_buffers = 1 if head.softcap is None else 2
        self.num_rows = max(1, chunk_bytes // (row_bytes * num_buffers))
        if shard is not None:
            self.num_rows = shard.smallest(self.num_rows, device)
        held_rows = max(1, min(self.num_rows, inputs.x.shape[0]))
        self._logits = _allocate(held_rows, vocabulary, head.dtype, device)
        self._slopes = None if head.softcap is None else _allocate(held_rows, vocabulary, head.dtype, device)
        block_bytes = BLOCK_BYTES if device.type == "cpu" else ACCELERATOR_BLOCK_BYTES
        self._block_rows = max(1, min(held_rows, block_bytes // row_bytes))
        self._scratch = torch.empty(self._block_rows, vocabulary, dtype=head.dtype, device=device)
        self._held: _Held | None = None

    def pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """The rows [start, end) as spans that fit the buffer."""
        return even_pieces(start, end, self.num_rows)

    def score(self, start: int, end: int, out: RowScores) -> None:
        """Computes the scores of these rows into `out` and keeps their exponentials."""
        head, rows = self._head, slice(start, end)
        inv_temperature = self._inputs.inv_temperature[rows].to(head.dtype)
        factor = torch.full_like(inv_temperature, head.scale)
        if head.softcap is None:
            factor = factor * inv_temperature
        x_NH = self._inputs.x[rows].to(head.dtype)
        torch.mm(x_NH, head.weight.t(), out=self._logits[: end - start])
        target, owned = self._columns(self._inputs.target[rows])
        merged, peak = self._exponentiate(target, owned, factor, inv_temperature, out.entropy is not None)
        log_sum = merged.sums.log()
        logp = (merged.picked - merged.peak).to(torch.float64) - log_sum
        out.logp.copy_(logp)
        out.logsumexp.copy_(log_sum + merged.peak)
        if out.entropy is not None:
            out.entropy.copy_(log_sum - merged.dots / merged.sums)
        # The exponentials are relative to the largest logit at hand, which a shard may have far below the row's.
        log_total = log_sum + (merged.peak - peak).to(torch.float64)
        self._held = _Held(
            x_NH, start, target, owned, factor, inv_temperature, log_total.exp() if self._shard else merged.sums,
            log_total, -torch.expm1(logp), out.entropy,
        )  # fmt: skip

    def _columns(self, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Each row's target as a column of the weight at hand, and whether it is one."""
        if self._shard is None:
            return target, None
        column = target - self._shard.start
        owned = (column >= 0) & (column < self._head.weight.shape[0])
        return torch.where(owned, column, 0), owned

    def _exponentiate(
        self,
        target: Tensor,
        owned: Tensor | None,
        factor: Tensor,
        inv_temperature: Tensor,
        with_entropy: bool,
    ) -> tuple[MergedRows, Tensor]:
        """Turns the logits into exponentials relative to each row's maximum, and sums them.

        Returns the sums over the whole vocabulary, and the maximum of the logits at hand.
        """
        head, num_rows = self._head, target.shape[0]
        logits_NV = self._logits[:num_rows]
        picked, peak = (torch.empty(num_rows, 1, dtype=head.dtype, device=target.device) for _ in "ab")
        sums = torch.empty(num_rows, dtype=torch.float64, device=target.device)
        dots = torch.zeros_like(sums)
        index = target[:, None]
        for low in range(0, num_rows, self._block_rows):
            high = min(low + self._block_rows, num_rows)
            block_BV, scratch_BV = logits_NV[low:high], self._scratch[: high - low]
            self._shape_logits(block_BV, low, high, factor, inv_temperature)
            torch.amax(block_BV, 1, keepdim=True, out=peak[low:high])
            torch.gather(block_BV, 1, index[low:high], out=picked[low:high])
            block_BV.sub_(peak[low:high])
            if head.bias is not None:
                block_BV.clamp_(min=LOWEST)
            if with_entropy:
                torch.exp(block_BV, out=scratch_BV)
                block_BV.mul_(scratch_BV)
                torch.sum(block_BV, 1, dtype=torch.float64, out=dots[low:high])
                block_BV.copy_(scratch_BV)
            else:
                torch.exp(block_BV, out=block_BV)
            torch.sum(block_BV, 1, dtype=torch.float64, out=sums[low:high])
        peak_N, picked_N = peak[:, 0], picked[:, 0]
        if self._shard is None or owned is None:
            return MergedRows(peak_N, sums, dots, picked_N), peak_N
        return self._shard.merge(peak_N, sums, dots, torch.where(owned, picked_N, -torch.inf)), peak_N

    def accumulate(self, coefficient: Tensor, entropy_weight: Tensor | None, out: Gradients) -> None:
        """Turns the held exponentials into dL/dlogits and adds their products to the gradients.

        As head_step.Chunk says; the exponentials are used up.
        """
        assert self._held is not None, "accumulate() follows score()"
        held, self._held = self._held, None
        live = coefficient != 0
        if entropy_weight is not None:
            live = live | (entropy_weight != 0)
        rows = live.nonzero()[:, 0]
        num_live = rows.shape[0]
        if num_live == 0:
            return
        whole = num_live == live.shape[0]
        self._differentiate(held, rows, whole, coefficient, entropy_weight)
        gradient_AV = self._logits[:num_live]
        factor = held.factor if whole else held.factor[rows]
        x_AH = (held.x if whole else held.x[rows]) * factor[:, None]
        x_grad_AH = self._product_with_weight(gradient_AV)
        x_grad_AH.mul_(factor[:, None])
        if whole:
            out.x[held.start : held.start + num_live].copy_(x_grad_AH)
        else:
            out.x.index_copy_(0, rows + held.start, x_grad_AH.to(out.x.dtype))
        if out.weight is not None:
            out.weight.addmm_(gradient_AV.t(), x_AH)
        if out.bias is not None:
            out.bias.addmv_(gradient_AV.t(), factor)

    def _product_with_weight(self, gradient_AV: Tensor) -> Tensor:
        """gradient weight, a long vocabulary in parts.

        Tens of thousands of small terms that are added one by one to a sum near 1 lose their last digits.
        """
        weight = self._head.weight
        product_AH = torch.mm(gradient_AV[:, :COLUMNS_AT_ONCE], weight[:COLUMNS_AT_ONCE])
        for low in range(COLUMNS_AT_ONCE, weight.shape[0], COLUMNS_AT_ONCE):
            high = low + COLUMNS_AT_ONCE
            # Not addmm_: a product may begin its sums with what it adds to.
            product_AH += torch.mm(gradient_AV[:, low:high], weight[low:high])
        return product_AH

    def _shape_logits(
        self, block_BV: Tensor, low: int, high: int, factor: Tensor, inv_temperature: Tensor
    ) -> None:
        """Bias, scale and softcap, in place; the softcap's slope is kept.

        Scaled here and not in the inputs, whose rounding would be that of every term of the product.
        """
        head = self._head
        if head.bias is not None:
            block_BV.add_(head.bias)
        block_BV.mul_(factor[low:high, None])
        if head.softcap is not None:
            assert self._slopes is not None
            slope_BV = self._slopes[low:high]
            block_BV.mul_(1.0 / head.softcap)
            # tanh' as 1 / cosh^2: 1 - tanh^2 has no digits left where the softcap saturates.
            torch.cosh(block_BV, out=slope_BV)
            slope_BV.reciprocal_().square_()
            block_BV.tanh_()
            block_BV.mul_((inv_temperature[low:high] * head.softcap)[:, None])

    def _differentiate(
        self, held: _Held, rows: Tensor, whole: bool, coefficient: Tensor, entropy_weight: Tensor | None
    ) -> None:
        """Writes dL/d(x weight^T) of the live rows over the front of the buffer, in order.

        dlogp/dz = onehot - p; d(-H)/dz = p (log p + H). The one-hot is subtracted in float64, where
        1 - p(target) has no cancellation, and only then rounded.
        """
        dtype = self._head.dtype
        coefficient = coefficient.to(torch.float64)
        slope_p = -coefficient / held.total
        slope_plogp = None
        if entropy_weight is not None and held.entropy is not None:
            slope_plogp = entropy_weight.to(torch.float64) / held.total
            slope_p = slope_p + slope_plogp * (held.entropy - held.log_total)
        at_target = (coefficient * held.miss).to(dtype)
        for low in range(0, rows.shape[0], self._block_rows):
            high = min(low + self._block_rows, rows.shape[0])
            picked = slice(low, high) if whole else rows[low:high]
            # Live rows only move to the front: a block never overwrites a live row that is still to be read.
            block_BV = self._logits[low:high]
            if not whole:
                moved_BV = self._scratch[: high - low]
                torch.index_select(self._logits, 0, rows[low:high], out=moved_BV)
                block_BV.copy_(moved_BV)
            target = held.target[picked][:, None]
            onehot = at_target[picked][:, None]
            if slope_plogp is not None:
                scratch_BV = self._scratch[: high - low]
                torch.clamp(block_BV, min=torch.finfo(dtype).tiny, out=scratch_BV)
                scratch_BV.log_().mul_(block_BV).mul_(slope_plogp[picked][:, None].to(dtype))
                entropy_part = (
                    torch.gather(block_BV, 1, target)
                    .mul_((slope_p + coefficient / held.total)[picked][:, None].to(dtype))
                    .add_(torch.gather(scratch_BV, 1, target))
                )
                onehot = onehot + entropy_part
                block_BV.mul_(slope_p[picked][:, None].to(dtype)).add_(scratch_BV)
            else:
                block_BV.mul_(slope_p[picked][:, None].to(dtype))
            if held.owned is not None:
                onehot = torch.where(held.owned[picked][:, None], onehot, torch.gather(block_BV, 1, target))
            block_BV.scatter_(1, target, onehot)
            if self._slopes is not None:
                slope_BV = self._slopes[low:high] if whole else self._slopes[rows[low:high]]
                block_BV.mul_(slope_BV).mul_(held.inv_temperature[picked][:, None])


def _allocate(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised [rows, columns]; see HEAP_LIMIT for the size of what lies behind it."""
    size = rows * columns
    if device.type == "cpu" and HEAP_SAFE < size * dtype.itemsize < HEAP_LIMIT:
        return torch.empty(HEAP_LIMIT // dtype.itemsize, dtype=dtype)[:size].view(rows, columns)
    return torch.empty(size, dtype=dtype, device=device).view(rows, columns)
