"""What the reference back-end has: every op, in plain PyTorch, on any device; see registry.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headway_kernels.head_reference import reference_head_logp, reference_head_loss_step
from headway_kernels.policy_reference import reference_policy_loss
from headway_kernels.registry import Backend

_OPS: Mapping[str, Callable[..., Any]] = {
    "head_logp": reference_head_logp,
    "head_loss_step": reference_head_loss_step,
    "policy_loss": reference_policy_loss,
}


def backends() -> list[Backend]:
    """One entry an op; they take every call that the public functions accept."""
    return [Backend("reference", op, _takes_all, function) for op, function in _OPS.items()]


def _takes_all(arguments: Mapping[str, Any]) -> str | None:
    return None
