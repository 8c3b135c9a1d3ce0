"""Where a kernel runs: the device's context, what the interpreter may run, the parts of an objective as arguments.

Legend: T tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from headway_kernels.objective import Objective
from headway_kernels.triton.interpreted import bf16_is_repaired, compiled_architecture, is_interpreted

# A kernel's scalars of an objective, in the order of policy_token's `bounds`.
Bounds = tuple[float, ...]


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The context in which kernels for this tensor are launched."""
    if tensor.device.type == "cuda":
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def architecture() -> int:
    """That of the current GPU, 90 for compute capability 9.0; in the interpreter that of an H200."""
    return 90 if is_interpreted() else compiled_architecture()


def bounds_of(objective: Objective) -> Bounds:
    """The objective's scalars; an option that is off has a value that binds nothing."""
    return (
        1.0 - objective.clip_low,
        1.0 + objective.clip_high,
        objective.dual_clip if objective.dual_clip is not None else 1.0,
        objective.cap,
        objective.correction_cap,
        objective.correction_floor,
        objective.gate_positive,
        objective.gate_negative,
        objective.tv_bound,
        objective.kl_coef,
        objective.entropy_coef,
    )


def codes_of(objective: Objective) -> dict[str, int | bool]:
    """The compile-time part of an objective."""
    return {
        "FAMILY": int(objective.family),
        "CORRECTION": int(objective.correction_code),
        "DUAL_CLIP": objective.dual_clip is not None,
        "KL": int(objective.kl_code),
    }


def lacks_device(arguments: Mapping[str, Any]) -> str | None:
    """Why the tensors of a call are out of reach; None if they are not."""
    devices = {value.device for value in arguments.values() if isinstance(value, Tensor)}
    if len(devices) != 1:
        return f"its tensors are on several devices: {', '.join(sorted(map(str, devices)))}"
    device = next(iter(devices))
    expected = "cpu" if is_interpreted() else "cuda"
    if device.type != expected:
        where = "in the interpreter (TRITON_INTERPRET=1)" if is_interpreted() else "compiled"
        return f"the kernels run {where}, on {expected} tensors; got {device}"
    return None


def lacks_dtype(
    arguments: Mapping[str, Any], names: Iterable[str], allowed: Iterable[torch.dtype]
) -> str | None:
    """The first of the named tensors whose dtype is none of `allowed`."""
    for name in names:
        tensor = arguments.get(name)
        if tensor is not None and tensor.dtype not in tuple(allowed):
            listed = ", ".join(str(dtype) for dtype in allowed)
            return f"{name} is {tensor.dtype}; it takes {listed}"
        if (
            tensor is not None
            and tensor.dtype is torch.bfloat16
            and is_interpreted()
            and not bf16_is_repaired()
        ):
            return (
                f"{name} is bfloat16, which Triton's interpreter multiplies and rounds wrongly; import "
                "headway_kernels.proof.interpreter first, or use float32"
            )
    return None
