"""The head on the native CPU library: csrc/head.cpp scores rows and forms gradients; the policy loss is between them.

Called by cpu_backend.py. What the library computes does not depend on the number of threads, nor a row's scores on
the rows that it is scored with.

Legend: T rows, N rows held, A rows with a gradient, V vocabulary, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from ctypes import CDLL, byref
from typing import Any

import torch
from torch import Tensor

from headway_kernels import native
from headway_kernels.delta_format import DTYPE_CODES
from headway_kernels.head_results import CHUNK_BYTES, HeadLogp, HeadLoss
from headway_kernels.head_shard import VocabShard
from headway_kernels.head_step import Gradients, PolicyRows, RowScores, even_pieces, run_step
from headway_kernels.native import HeadStruct, RowsStruct, ScoresStruct, SlopesStruct
from headway_kernels.objective import Objective
from headway_kernels.policy_reference import reference_policy_loss


def supports_head(arguments: Mapping[str, Any]) -> str | None:
    """Why the library cannot take a call of head_logp or head_loss_step; None if it can."""
    x, weight = arguments["x"], arguments["weight"]
    if x.device.type != "cpu" or x.dtype not in DTYPE_CODES:
        return f"x is {x.dtype} on {x.device}; it takes float32, bfloat16 and float16 on the CPU"
    if arguments["shard"] is not None:
        return "it has no vocabulary-parallel head"
    if not weight.is_contiguous():
        return f"weight has strides {weight.stride()}; it takes a contiguous one"
    for name in ("weight_grad", "bias_grad"):
        gradient = arguments.get(name)
        if gradient is not None and not gradient.is_contiguous():
            return f"{name} has strides {gradient.stride()}; it takes a contiguous one"
    return None


def native_head_logp(
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
    """head_logp; no logits are held, so chunk_bytes has no part in it."""
    with torch.no_grad():
        head = _Head.prepare(weight, bias, softcap, logit_scale)
        rows = _Rows.prepare(x, target, inv_temperature)
        out = RowScores.empty(x.shape[0], torch.float32, x.device, with_entropy=True)
        head.score(rows, None, out)
        assert out.entropy is not None
        return HeadLogp(out.logp, out.logsumexp, out.entropy)


def native_head_loss_step(
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
        head = _Head.prepare(weight, bias, softcap, logit_scale)
        chunk = NativeChunk(head, x, target, inv_temperature, chunk_bytes)
        policy = PolicyRows(
            behaviour, advantage, token_weight, segments, objective, reference, proximal, m2_limit,
            reference_policy_loss,
        )  # fmt: skip
        with_entropy = want_entropy or objective.entropy_coef != 0
        scores = RowScores.empty(x.shape[0], torch.float32, x.device, with_entropy=with_entropy)
        x_grad = torch.zeros(x.shape, dtype=x.dtype)
        loss, stats = run_step(chunk, policy, scores, Gradients(x_grad, weight_grad, bias_grad))
        chunk.close()
        return HeadLoss(loss, x_grad, scores.logp, scores.entropy, stats)


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows as the library reads them: x float32 [N, H], target int64 [N], inv_temperature float32 [N]."""

    x: Tensor
    target: Tensor
    inv_temperature: Tensor

    @staticmethod
    def prepare(x: Tensor, target: Tensor, inv_temperature: Tensor) -> _Rows:
        x = x.detach().to(torch.float32)
        if x.shape[1] > 1 and x.stride(1) != 1:
            x = x.contiguous()
        return _Rows(x, target.contiguous(), inv_temperature.detach().to(torch.float32).contiguous())

    def struct(self) -> RowsStruct:
        return RowsStruct(
            self.x.data_ptr(),
            self.x.stride(0),
            self.x.shape[0],
            self.target.data_ptr(),
            self.inv_temperature.data_ptr(),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Softmax:
    """Per row: the largest logit, float32 [N]; sum of exp(z - top) and 1 - p(target), float64 [N]."""

    top: Tensor
    total: Tensor
    miss: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Head:
    """A head in its own dtype; bias float32."""

    lib: CDLL
    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    scale: float

    @staticmethod
    def prepare(weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float | None) -> _Head:
        lib = native.library()
        assert lib is not None, "cpu_backend offers nothing without the library"
        bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        return _Head(lib, weight.detach(), bias, softcap, 1.0 if scale is None else scale)

    @property
    def row_stride(self) -> int:
        """Floats from one row of kept logits to the next."""
        return self.lib.headway_head_row_stride(self.weight.shape[0])

    def struct(self) -> HeadStruct:
        return HeadStruct(
            self.weight.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.weight.shape[0],
            self.weight.shape[1],
            self.scale,
            self.softcap or 0.0,
            DTYPE_CODES[self.weight.dtype],
        )

    def score(self, rows: _Rows, keep: Tensor | None, out: RowScores) -> _Softmax:
        """Writes the scores of the rows to `out`; keeps their logits in `keep` [N x row_stride] if it is given."""
        count = rows.x.shape[0]
        softmax = _Softmax(torch.empty(count), *torch.empty(2, count, dtype=torch.float64).unbind(0))
        scores = ScoresStruct(
            softmax.top.data_ptr(),
            softmax.total.data_ptr(),
            softmax.miss.data_ptr(),
            out.logp.data_ptr(),
            out.logsumexp.data_ptr(),
            None if out.entropy is None else out.entropy.data_ptr(),
        )
        kept = None if keep is None else keep.data_ptr()
        threads = torch.get_num_threads()
        self.lib.headway_head_score(byref(self.struct()), byref(rows.struct()), kept, byref(scores), threads)
        return softmax


# The last step's buffer: its fresh pages would cost a step 3 to 4 % of its time. At most one, of CHUNK_BYTES.
_spare: list[Tensor] = []


def release_buffers() -> None:
    """Gives back the memory that head_loss_step keeps from one call to the next, at most CHUNK_BYTES."""
    _spare.clear()


def _take_buffer(size: int) -> Tensor:
    """float32 [size or more], uninitialised; no other chunk has it."""
    try:
        buffer = _spare.pop()  # one operation, so of two threads one gets it
    except IndexError:
        return torch.empty(size)
    return buffer if buffer.shape[0] >= size else torch.empty(size)


class NativeChunk:
    """A reused buffer for the logits of some of the rows (a head_step.Chunk)."""

    def __init__(
        self, head: _Head, x: Tensor, target: Tensor, inv_temperature: Tensor, chunk_bytes: int
    ) -> None:
        """Plans for these rows within `chunk_bytes` (one row at least)."""
        self._head, self._x, self._target, self._inv_temperature = head, x, target, inv_temperature
        row_stride = head.row_stride
        self._num_rows = max(1, chunk_bytes // (4 * row_stride))
        self._kept = _take_buffer(min(self._num_rows, max(1, x.shape[0])) * row_stride)
        self._held: tuple[int, _Rows, _Softmax, Tensor | None] | None = None

    def close(self) -> None:
        """Leaves the buffer to the next chunk; nothing may follow."""
        if self._kept.nbytes <= CHUNK_BYTES:
            _spare[:] = [self._kept]

    def pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """The rows [start, end) as spans that fit the buffer."""
        return even_pieces(start, end, self._num_rows)

    def score(self, start: int, end: int, out: RowScores) -> None:
        """Computes the scores of these rows into `out` and keeps their logits."""
        span = slice(start, end)
        rows = _Rows.prepare(self._x[span], self._target[span], self._inv_temperature[span])
        self._held = start, rows, self._head.score(rows, self._kept, out), out.entropy

    def accumulate(self, coefficient: Tensor, entropy_weight: Tensor | None, out: Gradients) -> None:
        """Adds the gradients of the held rows; their logits are used up."""
        assert self._held is not None, "accumulate() follows score()"
        (start, rows, softmax, entropy), self._held = self._held, None
        live = coefficient != 0
        if entropy_weight is not None:
            live = live | (entropy_weight != 0)
        chosen = live.nonzero()[:, 0]
        if chosen.shape[0] == 0:
            return
        slopes = self._slopes(rows, softmax, coefficient, entropy_weight, entropy)
        x_grad_AH = torch.empty(chosen.shape[0], rows.x.shape[1])
        self._head.lib.headway_head_gradient(
            byref(self._head.struct()),
            byref(rows.struct()),
            byref(SlopesStruct(softmax.top.data_ptr(), *(part.data_ptr() for part in slopes))),
            self._kept.data_ptr(),
            chosen.data_ptr(),
            chosen.shape[0],
            x_grad_AH.data_ptr(),
            None if out.weight is None else out.weight.data_ptr(),
            None if out.bias is None else out.bias.data_ptr(),
            torch.get_num_threads(),
        )
        out.x.index_copy_(0, chosen + start, x_grad_AH.to(out.x.dtype))

    def _slopes(
        self,
        rows: _Rows,
        softmax: _Softmax,
        coefficient: Tensor,
        entropy_weight: Tensor | None,
        entropy: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """alpha, beta and at_target of HeadwaySlopes, in head.py's words: with e = exp(z - top), p = e / total,

        c (onehot - p) + h p (log p + H) = e (h (H - log total) - c) / total + e (z - top) h / total + c onehot
        """
        factor = rows.inv_temperature.to(torch.float64) * self._head.scale
        c, log_total = coefficient.to(torch.float64), softmax.total.log()
        alpha, beta, at_target = -c, torch.zeros_like(c), softmax.miss * c
        if entropy_weight is not None:
            assert entropy is not None
            h = entropy_weight.to(torch.float64)
            alpha = alpha + h * (entropy - log_total)
            beta = h
            p = 1.0 - softmax.miss
            at_target = at_target + h * (torch.xlogy(p, p) + p * entropy)
        share = factor / softmax.total
        return (alpha * share).float(), (beta * share).float(), (at_target * factor).float()
