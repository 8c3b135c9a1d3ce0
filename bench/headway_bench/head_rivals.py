"""What `headway bench head` lets take turns: the native head and what computes the same with torch.

    full      one product, all logits, cross_entropy; autograd keeps the logits and their softmax
    chunked   the same over 128 rows at a time; with gradients each chunk is recomputed in the backward
    eager     the same over 128 rows at a time, each chunk's backward at once, so that nothing is recomputed
    linear_cross_entropy, .._chunked   torch's own (2.13 and later), without and with its chunking; with gradients it
              is the mean cross-entropy, as its chunks take no weights of rows
    liger     liger-kernel's chunked policy loss (CISPO), a sequence at a time, its loss not compiled; no forward alone

Every other contestant's gradients are those of one policy loss: -sg(min(r, 5)) A log p, mean over T. The native head
computes the entropy and its statistics on top. Legend: T rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headway_kernels.head import head_logp, head_loss_step
from headway_kernels.objective import Objective

CHUNK_ROWS = 128
CAP = 5.0
Forward = Callable[[], Tensor]
Gradients = Callable[[], tuple[Tensor, Tensor]]
MEAN_CROSS_ENTROPY = ("linear_cross_entropy", "linear_cross_entropy_chunked")


@dataclass(frozen=True)
class Rows:
    """x [T, H], weight [V, H] float32 leaves; target int64 [T]; behaviour, advantage float32 [T].

    Advantages are those of sequences of CHUNK_ROWS tokens.
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    behaviour: Tensor
    advantage: Tensor

    @staticmethod
    def random(T: int, H: int, V: int) -> Rows:
        """T is a multiple of CHUNK_ROWS; log-probs near the policy's own, so no ratio meets the cap."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(T, H, generator=generator)
        weight = torch.randn(V, H, generator=generator) * H**-0.5
        target = torch.randint(0, V, (T,), generator=generator)
        ones = torch.ones(T)
        behaviour = head_logp(x, weight, target, inv_temperature=ones).logp
        behaviour = behaviour + 0.1 * torch.randn(T, generator=generator)
        advantage = torch.randn(T // CHUNK_ROWS, generator=generator).repeat_interleave(CHUNK_ROWS)
        return Rows(x.requires_grad_(), weight.requires_grad_(), target, behaviour, advantage)

    def pieces(self) -> list[tuple[Tensor, ...]]:
        """x, target, behaviour, advantage of CHUNK_ROWS rows each."""
        parts = (self.x, self.target, self.behaviour, self.advantage)
        return list(zip(*(part.split(CHUNK_ROWS) for part in parts), strict=True))


def forwards(rows: Rows) -> dict[str, Forward]:
    """By name: the log-probs of the targets, float32 [T], without a gradient."""
    x, weight, ones = rows.x.detach(), rows.weight.detach(), torch.ones(rows.x.shape[0])

    def logp(x: Tensor, target: Tensor) -> Tensor:
        return -functional.cross_entropy(functional.linear(x, weight), target, reduction="none")

    def chunked() -> Tensor:
        return torch.cat([logp(piece[0].detach(), piece[1]) for piece in rows.pieces()])

    found: dict[str, Forward] = {
        "headway": lambda: head_logp(x, weight, rows.target, inv_temperature=ones, backend="cpu").logp,
        "full": lambda: logp(x, rows.target),
        "chunked": chunked,
    }
    if _has_linear_cross_entropy():
        found["linear_cross_entropy"] = lambda: (
            -functional.linear_cross_entropy(x, weight, rows.target, reduction="none")
        )
    return found


def gradients(rows: Rows) -> dict[str, Gradients]:
    """By name: dL/dx and dL/dweight."""
    T, whole = rows.x.shape[0], (rows.x, rows.target, rows.behaviour, rows.advantage)

    def chunked() -> Tensor:
        losses = [checkpoint(_loss, rows.weight, *piece, use_reentrant=False) for piece in rows.pieces()]
        return torch.stack(losses).sum() / T

    found: dict[str, Gradients] = {
        "headway": lambda: _native(rows),
        "full": lambda: _autograd(rows, lambda: _loss(rows.weight, *whole) / T),
        "chunked": lambda: _autograd(rows, chunked),
        "eager": lambda: _eager(rows),
    }
    if _has_linear_cross_entropy():
        found["linear_cross_entropy"] = lambda: _autograd(
            rows, lambda: functional.linear_cross_entropy(rows.x, rows.weight, rows.target)
        )
        options = torch.nn.LinearCrossEntropyOptions()
        found["linear_cross_entropy_chunked"] = lambda: _autograd(
            rows, lambda: functional.linear_cross_entropy(rows.x, rows.weight, rows.target, options=options)
        )
    if importlib.util.find_spec("liger_kernel") is not None:
        found["liger"] = _liger(rows)
    return found


def absent() -> dict[str, str]:
    """Why a contestant is missing here, by name."""
    missing: dict[str, str] = {}
    if not _has_linear_cross_entropy():
        missing["linear_cross_entropy"] = f"torch {torch.__version__} has none (2.13 does)"
    if importlib.util.find_spec("liger_kernel") is None:
        missing["liger"] = "liger-kernel is not installed (pip install --no-deps liger-kernel; needs triton)"
    return missing


def _has_linear_cross_entropy() -> bool:
    return hasattr(functional, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


def _native(rows: Rows) -> tuple[Tensor, Tensor]:
    T = rows.x.shape[0]
    weight_grad = torch.zeros(rows.weight.shape)
    out = head_loss_step(
        rows.x.detach(),
        rows.weight.detach(),
        rows.target,
        inv_temperature=torch.ones(T),
        behaviour=rows.behaviour,
        advantage=rows.advantage,
        token_weight=torch.full((T,), 1.0 / T),
        segments=None,
        objective=Objective("cispo", cap=CAP),
        weight_grad=weight_grad,
        backend="cpu",
    )
    return out.x_grad, weight_grad


def _loss(weight: Tensor, x: Tensor, target: Tensor, behaviour: Tensor, advantage: Tensor) -> Tensor:
    """Summed over the rows."""
    logp = -functional.cross_entropy(functional.linear(x, weight), target, reduction="none")
    ratio = (logp.detach() - behaviour).exp().clamp(max=CAP)
    return -(ratio * advantage * logp).sum()


def _autograd(rows: Rows, loss: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    x_grad, weight_grad = torch.autograd.grad(loss(), (rows.x, rows.weight))
    return x_grad, weight_grad


def _eager(rows: Rows) -> tuple[Tensor, Tensor]:
    T = rows.x.shape[0]
    x_grad, weight_grad = torch.empty(rows.x.shape), torch.zeros(rows.weight.shape)
    with torch.no_grad():
        for (x, target, behaviour, advantage), out in zip(
            rows.pieces(), x_grad.split(CHUNK_ROWS), strict=True
        ):
            z = functional.linear(x, rows.weight)
            slope = torch.softmax(z, 1)
            picked = slope.gather(1, target[:, None])
            ratio = (picked[:, 0].log() - behaviour).exp().clamp(max=CAP)
            c = ratio * advantage / T
            slope.scatter_add_(1, target[:, None], torch.full_like(picked, -1.0)).mul_(c[:, None])
            torch.mm(slope, rows.weight, out=out)
            weight_grad.addmm_(slope.t(), x)
    return x_grad, weight_grad


def _liger(rows: Rows) -> Gradients:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # type: ignore[import-not-found]

    made: Any = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, loss_type="cispo", epsilon_high=CAP
    )
    shape = (rows.x.shape[0] // CHUNK_ROWS, CHUNK_ROWS)
    mask = torch.ones(shape)
    advantage = rows.advantage.view(shape)[:, 0].contiguous()

    def loss() -> Tensor:
        return made(
            rows.x.view(*shape, -1),
            rows.weight,
            rows.target.view(shape),
            mask,
            advantage,
            old_per_token_logps=rows.behaviour.view(shape),
        )[0]

    return lambda: _autograd(rows, loss)
