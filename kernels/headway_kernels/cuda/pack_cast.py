"""The CUDA kernel behind headway_kernels.pack_cast: csrc/cuda/pack_cast.cu, many tensors in one launch.

Called by pack_cast.PackTable, which has checked shapes, dtypes, strides, scales and that there is one device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from headway_kernels.cuda.library import PackPart, library
from headway_kernels.errors import UnsupportedOption
from headway_kernels.pack_cast import Part, struct_fields


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
        structs = (PackPart * len(parts))(*(PackPart(**struct_fields(part)) for part in parts))
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


assert ctypes.sizeof(PackPart) == 96, "HeadwayPackPart of csrc/cuda/headway_cuda.h"
