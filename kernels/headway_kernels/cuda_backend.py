"""What the CUDA back-end has: ops of kernels/csrc/cuda, which compute in fp32; see registry.py.

weight_delta and pack_cast are called by their own modules (headway_kernels.cuda.weight_delta, .pack_cast).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headway_kernels.registry import Backend

# Narrower inputs are widened to fp32, exactly, before the kernel reads them.
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def backends() -> list[Backend]:
    """policy_loss and segment_scan.

    Raises:
        BackendUnavailable: no library, or no GPU.
    """
    from headway_kernels.cuda.library import library
    from headway_kernels.cuda.policy_loss import cuda_policy_loss
    from headway_kernels.cuda.segment_scan import cuda_segment_scan

    automatic = not library().is_emulated
    return [
        Backend("cuda", "policy_loss", _lacks, cuda_policy_loss, automatic),
        Backend("cuda", "segment_scan", _lacks, cuda_segment_scan, automatic),
    ]


def _lacks(arguments: Mapping[str, Any]) -> str | None:
    """The segments may lie on the CPU, where they are checked without a host sync; the rest is on the GPU."""
    from headway_kernels.cuda.library import library

    tensors = {
        name: value for name, value in arguments.items() if isinstance(value, Tensor) and name != "segments"
    }
    for name, tensor in tensors.items():
        if name not in ("mask", "m2_limit") and tensor.dtype not in _FLOATS:
            return f"its kernels compute in fp32, and {name} is {tensor.dtype}"
    return library().lacks(list(tensors.values()))
