"""What the reference back-end has: every op, in plain PyTorch, on any device; see registry.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headway_kernels.head_masked_reference import reference_head_masked, reference_head_masked_loss_step
from headway_kernels.head_reference import reference_head_logp, reference_head_loss_step
from headway_kernels.policy_reference import reference_policy_loss
from headway_kernels.registry import Backend
from headway_kernels.segment_scan_reference import reference_segment_scan

_OPS: Mapping[str, Callable[..., Any]] = {
    "head_logp": reference_head_logp,
    "head_loss_step": reference_head_loss_step,
    "head_masked": reference_head_masked,
    "head_masked_loss_step": reference_head_masked_loss_step,
    "policy_loss": reference_policy_loss,
    "segment_scan": reference_segment_scan,
}


def backends() -> list[Backend]:
    """One entry an op; they take every call that the public functions accept."""
    return [Backend("reference", op, _takes_all, function) for op, function in _OPS.items()]


def _takes_all(arguments: Mapping[str, Any]) -> str | None:
    return None
