"""What weight_delta's public functions demand of the tensors and the memory that they are given."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_kernels.delta_format import DTYPE_CODES, value_type
from headway_kernels.errors import ShapeError


def check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], on_cuda: bool) -> None:
    """On CUDA its library says which device it takes: the emulated kernels run on the CPU.

    Raises:
        ShapeError: another dtype or device, or not contiguous.
    """
    is_elsewhere = not (tensor.is_cpu or on_cuda)
    if tensor.dtype not in dtypes or is_elsewhere or not tensor.is_contiguous():
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ShapeError(
            f"weight delta: {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
            f"contiguous: {tensor.is_contiguous()}; expected contiguous {expected}{'' if on_cuda else ' on the CPU'}"
        )


def check_flat(name: str, tensor: Tensor, on_cuda: bool) -> None:
    """
    Raises:
        ShapeError: no [N] of a dtype that deltas know.
    """
    check_tensor(name, tensor, tuple(DTYPE_CODES), on_cuda)
    if tensor.dim() != 1:
        raise ShapeError(f"weight delta: {name} is {list(tensor.shape)}; expected [N] (use view(-1))")


def given(payload: NDArray[np.uint8] | None, like: Tensor) -> NDArray[np.uint8] | None:
    """`payload` if there is one, once it is known to have room for all of `like`; see room."""
    return None if payload is None else room(payload, like)


def room(payload: NDArray[np.uint8] | None, like: Tensor) -> NDArray[np.uint8]:
    """`payload`, or fresh memory where it is None: uint8, at least the bytes of `like`.

    Raises:
        ShapeError: it is too small, of another kind, or read-only.
    """
    needed = like.numel() * value_type(like.dtype).itemsize
    if payload is None:
        return np.empty(needed, np.uint8)
    if (
        payload.dtype != np.uint8
        or payload.ndim != 1
        or payload.size < needed
        or not payload.flags.c_contiguous
    ):
        raise ShapeError(
            f"weight delta: payload is {payload.dtype} {list(payload.shape)}; "
            f"expected contiguous uint8 of at least {needed} bytes"
        )
    if not payload.flags.writeable:
        raise ShapeError("weight delta: payload is read-only")
    return payload
