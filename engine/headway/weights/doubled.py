"""Weights served from one of two buffers: pushes are written into the other beside generation, then they change places.

The pause is the rebinding of views, whatever the channel, the dtype and the share that changed; the price is a second
copy of the engine's weights. The stager's thread calls `prepare` and `settle`, and `read`; the engine's calls `write`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headway.types import Manifest, PolicyVersion
from headway.weights.served import FlatEngine, FlatServed, is_dense, write_flat
from headway_kernels.weight_delta import Delta


class DoubledServed(FlatServed):
    """Served over a FlatEngine and a buffer like its own.

    Args:
        engine: computes in fp32; it must read nothing but `flat` once `swap` has returned.
        manifest: of the weights it serves.
    """

    prepares = True

    def __init__(self, engine: FlatEngine, manifest: Manifest) -> None:
        super().__init__(engine, manifest)
        flat = engine.flat
        # numpy asks for huge pages, torch does not: scattered writes would miss the TLB at every one.
        room = torch.from_numpy(np.empty(flat.numel() * flat.element_size(), np.uint8))
        self._spare = room.view(flat.dtype).zero_()
        self._equal = False  # the spare holds what is served

    @property
    def swaps(self) -> bool:
        """Never from the channel's memory: these two buffers are what is served."""
        return False

    def prepare(self, deltas: Sequence[Delta], *, more: bool) -> None:
        """See Served."""
        if not more and not self._equal and not (deltas and is_dense(deltas[0])):
            self._spare.copy_(self._engine.flat)
        self._equal = False
        for delta in deltas:
            write_flat(delta, self._spare)

    def write(self, version: PolicyVersion, deltas: Sequence[Delta]) -> None:
        """Serve what was prepared."""
        del deltas
        served = self._engine.flat
        if served is not self._spare:  # else the first attempt had got as far as this
            self._retired = served
        self._engine.swap(self._spare, version)

    def settle(self, stretches: Sequence[tuple[int, int]]) -> None:
        """See Served."""
        served, self._spare = self._spare, self._retired
        for start, end in stretches:
            self._spare[start:end] = served[start:end]
        self._equal = True
