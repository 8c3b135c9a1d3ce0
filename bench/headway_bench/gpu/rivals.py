"""The rivals of the head, each as what it is called with: torch in three ways, and the packages that are installed.

Every one computes dL/dx and dL/dweight (step) or the log-probs of the targets (logp) of the same rows. Those that are
cross-entropies take the mean over tokens as their loss: the same products, less work on the rows than a policy loss.

Legend: T rows, H hidden, V vocabulary, B sequences.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Work = Callable[[], object]
FULL = "torch full logits"
PACKAGES = ("liger_kernel", "cut_cross_entropy", "flash_attn")
# Large pieces read and write the gradient of the weight less often: 1.2 GB of fp32 logits at a vocabulary of 152k.
PIECE_ROWS = 2048
SEQUENCE_TOKENS = 1024


@dataclass(frozen=True)
class Rows:
    """x: [T, H], weight: [V, H], both requiring gradients; target: [T]; behaviour, advantage: fp32 [T]."""

    x: Tensor
    weight: Tensor
    target: Tensor
    behaviour: Tensor
    advantage: Tensor

    def forget(self) -> None:
        """Drops the gradients of the last call."""
        self.x.grad = self.weight.grad = None


def steps(rows: Rows) -> dict[str, Work]:
    """By name, forward and both gradients. A rival is imported and built by its first call."""
    found: dict[str, Work] = {FULL: lambda: _full_step(rows), "torch chunked": lambda: _chunked_step(rows)}
    if hasattr(functional, "linear_cross_entropy"):
        found["torch lce"] = lambda: _backward(rows, _torch_loss(rows, "mean"))
    if _installed("liger_kernel"):
        found["liger ce"] = _Lazy(lambda: _liger_ce(rows))
        found["liger grpo"] = _Lazy(lambda: _liger_policy(rows))
    if _installed("cut_cross_entropy"):
        found["cce"] = lambda: _backward(rows, _cut_loss(rows, "mean"))
    if _installed("flash_attn"):
        found["flash-attn ce"] = lambda: _backward(rows, _flash_loss(rows).mean())
    return found


def logps(rows: Rows) -> dict[str, Work]:
    """By name, the log-prob of every target, without gradients."""
    found: dict[str, Work] = {
        FULL: lambda: _logp(rows, rows.x.shape[0]),
        "torch chunked": lambda: _logp(rows, PIECE_ROWS),
    }
    if hasattr(functional, "linear_cross_entropy"):
        found["torch lce"] = lambda: _without_gradients(lambda: _torch_loss(rows, "none"))
    if _installed("cut_cross_entropy"):
        found["cce"] = lambda: _without_gradients(lambda: _cut_loss(rows, "none"))
    if _installed("flash_attn"):
        found["flash-attn ce"] = lambda: _without_gradients(lambda: _flash_loss(rows))
    return found


def missing() -> list[str]:
    """What cannot be called here, and so is not measured."""
    lacking = [name for name in PACKAGES if not _installed(name)]
    if not hasattr(functional, "linear_cross_entropy"):
        lacking.append(f"torch's linear_cross_entropy (torch {torch.__version__} has none)")
    return lacking


class _Lazy:
    """Work that is made by its first call."""

    def __init__(self, make: Callable[[], Work]) -> None:
        self._make = make
        self._work: Work | None = None

    def __call__(self) -> object:
        if self._work is None:
            self._work = self._make()
        return self._work()


def full_bytes(rows: Rows) -> int:
    """What the step on full logits holds at once: bf16 logits, their fp32 copy and its gradient, a bf16 gradient."""
    return rows.x.shape[0] * rows.weight.shape[0] * 14


def _full_step(rows: Rows) -> None:
    _backward(rows, _policy_loss(rows, rows.x, slice(None)))


def _chunked_step(rows: Rows) -> None:
    """Pieces of rows, each forward and backward before the next: torch's 3 products without a tensor of T x V."""
    rows.forget()
    x_grad = torch.empty_like(rows.x)
    for start in range(0, rows.x.shape[0], PIECE_ROWS):
        piece = slice(start, start + PIECE_ROWS)
        x = rows.x.detach()[piece].requires_grad_()
        _policy_loss(rows, x, piece).backward()
        assert x.grad is not None
        x_grad[piece] = x.grad
    rows.x.grad = x_grad


def _policy_loss(rows: Rows, x: Tensor, piece: slice) -> Tensor:
    """headway's default objective: the ratio, capped and without gradient, times advantage times log-prob."""
    logits = functional.linear(x, rows.weight).float()
    logp = torch.log_softmax(logits, -1).gather(1, rows.target[piece, None])[:, 0]
    ratio = (logp.detach() - rows.behaviour[piece]).clamp(-20, 20).exp().clamp(max=5.0)
    return -(ratio * rows.advantage[piece] * logp).sum() / rows.x.shape[0]


def _logp(rows: Rows, piece_rows: int) -> object:
    with torch.no_grad():
        return torch.cat([
            torch.log_softmax(functional.linear(x, rows.weight).float(), -1).gather(1, target[:, None])
            for x, target in zip(rows.x.split(piece_rows), rows.target.split(piece_rows), strict=True)
        ])  # fmt: skip


def _torch_loss(rows: Rows, reduction: str) -> Tensor:
    chosen = getattr(torch.nn, "LinearCrossEntropyOptions", None)  # chunked; torch 2.13 and later
    options = {} if chosen is None else {"options": chosen()}
    return functional.linear_cross_entropy(rows.x, rows.weight, rows.target, reduction=reduction, **options)


def _cut_loss(rows: Rows, reduction: str) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(rows.x, rows.weight, rows.target, reduction=reduction)


def _flash_loss(rows: Rows) -> Tensor:
    """Its Triton cross-entropy over full bf16 logits, whose gradient overwrites them."""
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    losses, _ = cross_entropy_loss(functional.linear(rows.x, rows.weight), rows.target, inplace_backward=True)
    return losses


def _liger_ce(rows: Rows) -> Work:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return lambda: _backward(rows, loss(rows.weight, rows.x, rows.target))


def _liger_policy(rows: Rows) -> Work:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="cispo", epsilon_high=5.0)
    length = min(SEQUENCE_TOKENS, rows.x.shape[0])
    sequences = rows.x.shape[0] // length
    shape = (sequences, length)
    mask = torch.ones(shape, device=rows.x.device)
    advantage = rows.advantage[:sequences].contiguous()

    def work() -> None:
        out = loss(
            rows.x.view(*shape, -1), rows.weight, rows.target.view(shape), mask, advantage,
            old_per_token_logps=rows.behaviour.view(shape),
        )  # fmt: skip
        _backward(rows, out[0])

    return work


def _backward(rows: Rows, loss: Tensor) -> None:
    rows.forget()
    loss.backward()


def _without_gradients(work: Work) -> object:
    with torch.no_grad():
        return work()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
