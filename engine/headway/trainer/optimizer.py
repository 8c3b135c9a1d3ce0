"""AdamW over flat fp32 masters, with clipping and a guard against non-finite gradients.

A stretch of the buffer may store `scale` times what is meant to be optimized (headway.model.lora): with lr * scale,
eps / scale and weight_decay / scale, AdamW's step over what is stored is `scale` times its step over what is meant.

The masters are the policy's flat buffer itself when fp32 is published. When bf16 is published they are a buffer
of their own and the policy computes with the rounded copy, exactly what the generators get: a small learning
rate then moves the masters even while the published weights stand still.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.config import LearnerConfig
from headway.model import Policy


@dataclass(frozen=True)
class UpdateResult:
    """What an update did: the gradient's global norm before clipping, and whether it was skipped."""

    grad_norm: float
    skipped: bool


@dataclass(frozen=True)
class FlatState:
    """All that an optimizer's updates depend on, besides the number of updates made.

    Attributes:
        master, exp_avg, exp_avg_sq: fp32 [num_elements], in the manifest's order.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @staticmethod
    def empty(num_elements: int) -> FlatState:
        """Memory for one."""
        return FlatState(*(torch.zeros(num_elements) for _ in range(3)))


class FlatOptimizer:
    """Updates a policy from its flat gradient.

    Args:
        policy: loaded with_grad; config: AdamW's numbers.
    """

    def __init__(self, policy: Policy, config: LearnerConfig) -> None:
        assert policy.grad is not None, "a policy to train needs a gradient buffer"
        self._policy = policy
        self._grad: Tensor = policy.grad
        self._max_grad_norm = config.max_grad_norm
        self._rounded = policy.manifest.dtype != "float32"
        self.master: Tensor = policy.flat.clone() if self._rounded else policy.flat
        policy.round_to_published()
        groups: list[dict[str, object]] = []
        self._parts: list[tuple[slice, nn.Parameter]] = []
        self._scales = [stretch.scale for stretch in policy.stretches]
        for stretch in policy.stretches:
            place, scale = slice(stretch.start, stretch.end), stretch.scale
            part = nn.Parameter(self.master[place])
            part.grad = self._grad[place]
            self._parts.append((place, part))
            decay = config.weight_decay / scale if stretch.decayed else 0.0
            groups.append({"params": [part], "weight_decay": decay, "eps": config.eps / scale})
        self._adamw = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )

    def update(self, lr: float) -> UpdateResult:
        """Clip, step, round, and clear the gradient.

        A gradient that is not finite changes nothing: masters, moments and weights stay as they are.
        """
        norm = self._grad_norm()
        skipped = not math.isfinite(norm)
        if not skipped:
            if norm > self._max_grad_norm:
                self._grad.mul_(self._max_grad_norm / norm)
            for group, scale in zip(self._adamw.param_groups, self._scales, strict=True):
                group["lr"] = lr * scale
            self._adamw.step()
            if self._rounded:
                self._policy.flat.copy_(self.master)
                self._policy.round_to_published()
        self._grad.zero_()
        return UpdateResult(norm, skipped)

    def _grad_norm(self) -> float:
        """Global, of the gradients by what the optimizer steps: theirs is `scale` times that by what is stored."""
        if set(self._scales) == {1.0}:
            return float(torch.linalg.vector_norm(self._grad))
        squares = [
            (scale * torch.linalg.vector_norm(self._grad[place])) ** 2
            for (place, _), scale in zip(self._parts, self._scales, strict=True)
        ]
        return float(torch.stack(squares).sum().sqrt())

    def copy_state(self, target: FlatState) -> int:
        """Copy masters and moments into `target`; returns the number of updates made."""
        target.master.copy_(self.master)
        num_updates = 0
        for place, part in self._parts:
            state = self._adamw.state[part]
            for name, moment in (("exp_avg", target.exp_avg), ("exp_avg_sq", target.exp_avg_sq)):
                if state:
                    moment[place].copy_(state[name])
                else:
                    moment[place].zero_()
            num_updates = int(state["step"]) if state else 0
        return num_updates

    def restore(self, source: FlatState, num_updates: int) -> None:
        """Go on from what copy_state gave; with 0 updates the moments start at zero."""
        with torch.no_grad():
            self.master.copy_(source.master)
        for place, part in self._parts:
            self._adamw.state[part].clear()
            if num_updates:
                self._adamw.state[part].update(
                    step=torch.tensor(float(num_updates), device=self.master.device),
                    exp_avg=source.exp_avg[place].to(self.master.device, copy=True),
                    exp_avg_sq=source.exp_avg_sq[place].to(self.master.device, copy=True),
                )
        if self._rounded:
            self._policy.flat.copy_(self.master)
            self._policy.round_to_published()
