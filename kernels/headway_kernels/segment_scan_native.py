"""segment_scan on the native CPU library: csrc/segment_scan.cpp. Called by cpu_backend.py."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from headway_kernels import native
from headway_kernels.native import ScanStruct
from headway_kernels.policy_loss import check_segments
from headway_kernels.segment_scan import KINDS, ScanKind, SegmentScan
from headway_kernels.segment_scan_reference import reference_segment_scan


def supports_scan(arguments: Mapping[str, Any]) -> str | None:
    """Why the library cannot take a call; None if it can."""
    rewards = arguments["rewards"]
    return None if rewards.device.type == "cpu" else f"rewards are on {rewards.device}; it runs on the CPU"


def native_segment_scan(
    kind: ScanKind,
    rewards: Tensor,
    segments: Tensor,
    *,
    values: Tensor | None,
    log_ratio: Tensor | None,
    mask: Tensor | None,
    bootstrap: Tensor | None,
    gamma: float,
    lam: float,
    rho_cap: float,
    c_cap: float,
) -> SegmentScan:
    """segment_scan, whose arguments these are, checked."""
    lib = native.library()
    assert lib is not None, "cpu_backend offers nothing without the library"
    check_segments(segments, rewards.shape[0])
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    floats = {
        name: None if tensor is None else tensor.detach().to(dtype).contiguous()
        for name, tensor in (
            ("rewards", rewards),
            ("values", values),
            ("log_ratio", log_ratio),
            ("bootstrap", bootstrap),
        )
    }
    flags = None if mask is None else mask.contiguous()
    offsets = segments.contiguous()
    out = torch.empty(2, rewards.shape[0], dtype=dtype)
    task = ScanStruct(
        _address(floats["rewards"]),
        offsets.data_ptr(),
        _address(floats["values"]),
        _address(floats["log_ratio"]),
        _address(flags),
        _address(floats["bootstrap"]),
        out[0].data_ptr(),
        out[1].data_ptr(),
        offsets.shape[0] - 1,
        gamma,
        lam,
        rho_cap,
        c_cap,
        KINDS.index(kind),
        int(dtype == torch.float64),
    )
    if lib.headway_segment_scan(byref(task), torch.get_num_threads()):
        # The reference names the token.
        return reference_segment_scan(
            kind, rewards, segments, values=values, log_ratio=log_ratio, mask=mask, bootstrap=bootstrap,
            gamma=gamma, lam=lam, rho_cap=rho_cap, c_cap=c_cap,
        )  # fmt: skip
    return SegmentScan(out[0], out[1])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
