"""The CUDA kernel behind headway_kernels.pack_cast: csrc/cuda/pack_cast.cu, many tensors in one launch.

Called by pack_cast.PackTable, which has checked shapes, dtypes, strides, scales and that there is one device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headway_kernels.cuda.library import PackPart, library
from headway_kernels.delta_format import DTYPE_CODES
from headway_kernels.errors import UnsupportedOption
from headway_kernels.pack_cast import FORMATS, Part


class DeviceParts:
    """Checked parts, uploaded once. The caller keeps their tensors alive.

    Raises:
        UnsupportedOption: the library cannot reach their device.
        BackendUnavailable: no library, or no GPU.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._lib = library()
        lacking = self._lib.lacks([part.source for part in parts])
        if lacking is not None:
            raise UnsupportedOption(f"pack_cast: backend 'cuda' lacks these tensors: {lacking}")
        self._device = parts[0].source.device if parts else torch.device("cpu")
        structs = (PackPart * len(parts))(*map(_describe, parts))
        tiles = [self._lib.pack_tiles(struct) for struct in structs]
        assert min(tiles, default=0) >= 0, "checked parts have tiles"
        starts = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(tiles, out=starts[1:])
        raw = np.frombuffer(bytes(structs), np.uint8).copy() if parts else np.zeros(0, np.uint8)
        self._table = torch.from_numpy(raw).to(self._device)
        self._first_tiles = torch.from_numpy(starts).to(self._device)
        self._num_parts, self._num_tiles = len(parts), int(starts[-1])

    def run(self) -> None:
        """Moves every part; enqueues one launch on the current stream."""
        if self._num_tiles:
            self._lib.call(
                "pack_cast", self._device, self._table, self._first_tiles, self._num_parts, 0, self._num_tiles
            )


def _describe(part: Part) -> PackPart:
    rows, columns = part.source.shape if part.source.dim() == 2 else (1, part.source.shape[0])
    source_stride, target_stride = _row_stride(part.source), _row_stride(part.target)
    if part.format == "cast" and source_stride == target_stride == columns:
        rows, columns = 1, rows * columns  # one long row: narrow rows would leave lanes idle
        source_stride = target_stride = columns
    return PackPart(
        source=part.source.data_ptr(),
        target=part.target.data_ptr(),
        scales=None if part.scales is None else part.scales.data_ptr(),
        rows=rows,
        columns=columns,
        source_stride=source_stride,
        target_stride=target_stride,
        scale_stride=0 if part.scales is None else part.scales.shape[1],
        source_dtype=DTYPE_CODES[part.source.dtype],
        target_dtype=DTYPE_CODES.get(part.target.dtype, 0),
        format=FORMATS.index(part.format),
    )


def _row_stride(tensor: Tensor) -> int:
    if tensor.dim() == 2 and tensor.shape[0] > 1:
        return tensor.stride(0)
    return tensor.shape[-1]


assert ctypes.sizeof(PackPart) == 96, "HeadwayPackPart of csrc/cuda/headway_cuda.h"
