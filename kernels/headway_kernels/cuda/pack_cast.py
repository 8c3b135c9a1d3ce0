"""Gather, scatter and cast of many tensors in one launch on CUDA: csrc/cuda/pack_cast.cu.

    table = PackTable([Part(weight, bucket[0:n].view_as(weight)), ...])      # once, at start
    table.run()                                                              # every push: one launch

A part's source and target are matrices whose rows may lie apart; a flat tensor is a matrix of one row. Casts round to
nearest even and treat a NaN as weight_delta.cast_and_diff does; equal dtypes are copied bit for bit.

    "cast"       bfloat16, float16, float32 to each other
    "fp8_block"  e4m3 codes x / scale, one fp32 scale = max|x| / 448 for each 128 x 128 block, 1 for a block of zeros
    "fp8_mx"     e4m3 codes x / 2^e, one exponent for each 32 neighbours of a row, stored as e + 127:
                 e = floor(log2 max|x|) - 8, at least -127 (OCP Microscaling Formats v1.0); values beyond +-448 become
                 +-448

A NaN stays a NaN code; a block that holds a NaN or an infinity gets the scale NaN (255 for fp8_mx), so it cannot pass
unseen.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headway_kernels.cuda.library import PackPart, library, require
from headway_kernels.delta_format import DTYPE_CODES
from headway_kernels.errors import ShapeError, UnsupportedOption

PackFormat = Literal["cast", "fp8_block", "fp8_mx"]
FORMATS = ("cast", "fp8_block", "fp8_mx")
BLOCK_SIDE = 128
MX_LENGTH = 32
_CODE_DTYPES = (torch.uint8, torch.float8_e4m3fn)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One matrix to move.

    Attributes:
        source: [R, C] or [C] of bfloat16, float16 or float32; unit stride along the last dimension.
        target: the same shape; a float for "cast", uint8 or float8_e4m3fn for fp8.
        format: one of FORMATS.
        scales: for fp8_block float32 [ceil(R / 128), ceil(C / 128)], for fp8_mx uint8 [R, ceil(C / 32)]; else None.
    """

    source: Tensor
    target: Tensor
    format: PackFormat = "cast"
    scales: Tensor | None = None


class PackTable:
    """Parts on one device, checked and uploaded once; keeps their tensors alive.

    Args:
        parts: their targets must not overlap.

    Attributes:
        num_bytes: read and written by one run.

    Raises:
        ShapeError: shapes, dtypes, strides or devices do not fit.
        UnsupportedOption: an unknown format.
        BackendUnavailable: no library, or no GPU.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._lib = library()
        self._parts = tuple(parts)
        self.num_bytes = sum(map(_moved_bytes, parts))
        devices = {tensor.device for part in parts for tensor in (part.source, part.target)}
        if len(devices) > 1:
            raise ShapeError(f"parts are on several devices: {', '.join(sorted(map(str, devices)))}")
        self._device = next(iter(devices), torch.device("cpu"))
        structs = (PackPart * len(parts))(*(_describe(part) for part in parts))
        tiles = [self._lib.pack_tiles(struct) for struct in structs]
        assert min(tiles, default=0) >= 0, "checked parts have tiles"
        starts = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(tiles, out=starts[1:])
        raw = np.frombuffer(bytes(structs), np.uint8).copy() if parts else np.zeros(0, np.uint8)
        self._table = torch.from_numpy(raw).to(self._device)
        self._first_tiles = torch.from_numpy(starts).to(self._device)
        self._num_tiles = int(starts[-1])

    def run(self) -> None:
        """Moves every part; enqueues one launch on the current stream."""
        if self._num_tiles:
            self._lib.call(
                "pack_cast",
                self._device,
                self._table,
                self._first_tiles,
                len(self._parts),
                0,
                self._num_tiles,
            )


def _describe(part: Part) -> PackPart:
    if part.format not in FORMATS:
        raise UnsupportedOption(f"pack_cast: format {part.format!r}; choose from {', '.join(FORMATS)}")
    if part.source.shape != part.target.shape or part.source.dim() not in (1, 2):
        raise ShapeError(
            f"pack_cast: source {list(part.source.shape)}, target {list(part.target.shape)}; "
            "expected one shape, [C] or [R, C]"
        )
    lib, floats = library(), tuple(DTYPE_CODES)
    for name, tensor, dtypes in (
        ("source", part.source, floats),
        ("target", part.target, floats if part.format == "cast" else _CODE_DTYPES),
    ):
        row = tensor if tensor.dim() == 1 else tensor[:1].reshape(-1) if tensor.shape[0] == 1 else tensor[0]
        require(f"pack_cast: {name}", row, dtypes, lib)
    (rows, columns) = part.source.shape if part.source.dim() == 2 else (1, part.source.shape[0])
    source_stride, target_stride = (_row_stride(tensor) for tensor in (part.source, part.target))
    if part.format == "cast" and source_stride == target_stride == columns:
        rows, columns = 1, rows * columns  # one long row: narrow rows would leave lanes idle
        source_stride = target_stride = columns
    scales = _check_scales(part)
    return PackPart(
        source=part.source.data_ptr(),
        target=part.target.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        rows=rows,
        columns=columns,
        source_stride=source_stride,
        target_stride=target_stride,
        scale_stride=0 if scales is None else _row_stride(scales),
        source_dtype=DTYPE_CODES[part.source.dtype],
        target_dtype=DTYPE_CODES.get(part.target.dtype, 0),
        format=FORMATS.index(part.format),
    )


def _check_scales(part: Part) -> Tensor | None:
    if part.format == "cast":
        if part.scales is not None:
            raise UnsupportedOption("pack_cast: format 'cast' writes no scales; leave them out")
        return None
    if part.scales is None:
        raise ShapeError(f"pack_cast: format {part.format!r} needs a tensor for its scales; got None")
    shape = scale_shape(part.source, part.format)
    dtype = torch.float32 if part.format == "fp8_block" else torch.uint8
    require("pack_cast: scales", part.scales, (dtype,), library())
    if tuple(part.scales.shape) != shape:
        raise ShapeError(
            f"pack_cast: scales are {list(part.scales.shape)}; expected {list(shape)} for {part.format!r}"
        )
    return part.scales


def scale_shape(source: Tensor, layout: PackFormat) -> tuple[int, int]:
    """Shape of the scales of a source [R, C] or [C] in an fp8 format."""
    rows, columns = source.shape if source.dim() == 2 else (1, source.shape[0])
    if layout == "fp8_block":
        return -(-rows // BLOCK_SIDE), -(-columns // BLOCK_SIDE)
    return rows, -(-columns // MX_LENGTH)


def _row_stride(tensor: Tensor) -> int:
    if tensor.dim() == 2 and tensor.shape[0] > 1:
        return tensor.stride(0)
    return tensor.shape[-1]


def _moved_bytes(part: Part) -> int:
    tensors = [part.source, part.target, *([] if part.scales is None else [part.scales])]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


assert ctypes.sizeof(PackPart) == 96, "HeadwayPackPart of csrc/cuda/headway_cuda.h"
