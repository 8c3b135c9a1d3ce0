"""The matrix products of head_loss_step that the vendor's GEMM computes, all accumulated and stored in fp32.

bf16 inputs multiply exactly into fp32 accumulators; fp32 inputs must not become TF32, whatever the process's setting.

Legend: N rows of a chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor


@contextlib.contextmanager
def full_precision() -> Generator[None]:
    """Products of fp32 tensors run in fp32 within."""
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision
    if before in ("none", "ieee"):
        yield
        return
    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        backend.fp32_precision = before


def logits_into(x_NH: Tensor, weight_VH: Tensor, out_NV: Tensor) -> None:
    """out = x weight^T; out: fp32, its rows may be apart."""
    _multiply(x_NH, weight_VH.t(), out_NV)


def input_gradient(gradient_NV: Tensor, weight_VH: Tensor) -> Tensor:
    """gradient weight, fp32 [N, H]; not bf16, whose split sums would be rounded on the way."""
    out = torch.empty(gradient_NV.shape[0], weight_VH.shape[1], dtype=torch.float32, device=weight_VH.device)
    _multiply(gradient_NV, weight_VH, out)
    return out


def add_weight_gradient(gradient_NV: Tensor, x_NH: Tensor, out_VH: Tensor) -> None:
    """out += gradient^T x; out: fp32."""
    if gradient_NV.dtype is torch.float32:
        out_VH.addmm_(gradient_NV.t(), x_NH)
    elif gradient_NV.device.type == "cpu":
        out_VH.addmm_(gradient_NV.t().float(), x_NH.float())
    else:
        torch.addmm(out_VH, gradient_NV.t(), x_NH, out_dtype=torch.float32, out=out_VH)


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    if a.dtype is torch.float32:
        torch.mm(a, b, out=out)
    elif a.device.type == "cpu":
        # The interpreter's tensors: the CPU has no product of bf16 into fp32, and casting loses nothing.
        torch.mm(a.float(), b.float(), out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
