"""weight_delta's public functions on the CUDA kernels: tensors on the GPU, deltas in host memory, ready for the wire.

Called by headway_kernels.weight_delta, which has checked sizes and dtypes; who applies every push along one table keeps
a weight_delta.DeviceTable instead, which apply_slices here uploads anew in each call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway_kernels.cuda.weight_delta import DeviceDelta, DeviceTable, apply, encode
from headway_kernels.cuda.weight_delta import apply_slices as apply_device_slices
from headway_kernels.delta_format import Delta
from headway_kernels.slice_table import SliceTable


def encode_to_host(
    pieces: Sequence[Tensor], old: Tensor, payload: NDArray[np.uint8] | None, *, update: bool
) -> Delta:
    """The delta from `old` to the pieces; its payload is the front of `payload` where that is given."""
    delta = encode(pieces, old, update=update).to_host()
    if payload is None:
        return delta
    front = payload[: delta.payload.size]
    front[...] = delta.payload
    return Delta(delta.num_elements, delta.dtype, delta.formats, delta.offsets, front, delta.num_changed)


def apply_delta(delta: Delta, destination: Tensor) -> None:
    """Uploads a delta and applies it."""
    apply(DeviceDelta.from_host(delta, destination.device), destination.view(-1))


def apply_slices(delta: Delta, table: SliceTable, destinations: Sequence[Tensor], *, cast: bool) -> None:
    """Uploads a delta and a table and applies the one along the other."""
    if destinations:
        on_device = DeviceDelta.from_host(delta, destinations[0].device)
        apply_device_slices(on_device, DeviceTable(table, destinations), cast=cast)
