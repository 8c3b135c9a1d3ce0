"""pack_cast in numpy and PyTorch: what the native back-ends must equal. Called by pack_cast.py, which has checked.

fp8 codes are torch's own cast to float8_e4m3fn after clamping to +-448.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headway_kernels.delta_reference import bits_of, cast_bits

FLOAT8_MAX = 448.0
NAN_CODE = 0x7F


def move(source: Tensor, target: Tensor, layout: str, scales: Tensor | None) -> None:
    """Moves one part; see pack_cast.py for the formats."""
    if layout == "cast":
        bits = cast_bits(bits_of(source.contiguous()), source.dtype, target.dtype)
        whole = torch.int32 if target.element_size() == 4 else torch.int16
        signed = np.int32 if target.element_size() == 4 else np.int16
        target.view(whole).copy_(torch.from_numpy(np.array(bits).view(signed)).view(target.shape))
        return
    assert scales is not None
    values = source.to(torch.float32)
    matrix = values if values.dim() == 2 else values[None]
    codes = target.view(torch.uint8) if target.dim() == 2 else target.view(torch.uint8)[None]
    quantise = _quantise_blocks if layout == "fp8_block" else _quantise_micro
    quantise(matrix, codes, scales)


def _quantise_blocks(matrix: Tensor, codes: Tensor, scales: Tensor) -> None:
    side = 128
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            span = (slice(i * side, (i + 1) * side), slice(j * side, (j + 1) * side))
            block = matrix[span]
            most = block.abs().max()
            scale = most / FLOAT8_MAX
            scale = torch.where(scale == 0, 1.0, torch.where(torch.isfinite(most), scale, torch.nan))
            scales[i, j] = scale
            codes[span] = encode(block / scale)


def _quantise_micro(matrix: Tensor, codes: Tensor, scales: Tensor) -> None:
    rows, columns = matrix.shape
    padded = torch.zeros(rows, scales.shape[1] * 32)
    padded[:, :columns] = matrix
    groups = padded.view(rows, scales.shape[1], 32)
    most = groups.abs().amax(2)
    exponent = most.view(torch.int32) >> 23
    code = torch.where(torch.isfinite(most), (exponent - 8).clamp(min=0), 255)
    scales.copy_(code.to(torch.uint8))
    power = ((254 - code) << 23).to(torch.int32).view(torch.float32)  # 2^(127 - code), by its bits
    factor = torch.where(code == 255, torch.nan, power)
    codes.copy_(encode((groups * factor[:, :, None]).view(rows, -1)[:, :columns]))


def encode(values: Tensor) -> Tensor:
    """uint8 e4m3 codes: nearest, ties to even, at most +-448; NaN is 0x7f."""
    clamped = values.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isnan(values), NAN_CODE, clamped)
