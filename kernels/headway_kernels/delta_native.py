"""The weight delta on the native CPU library: calls of csrc/delta.cpp; bit for bit what delta_reference.py gives.

Called by weight_delta.py, which has checked the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, byref, c_int64

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway_kernels.delta_format import BLOCK_ELEMENTS, DTYPE_CODES, Delta, count_blocks, value_type
from headway_kernels.native import DeltaStruct
from headway_kernels.slice_table import SliceTable


def encode(
    lib: CDLL,
    sources: Sequence[Tensor],
    old: Tensor,
    payload: NDArray[np.uint8],
    *,
    update: bool,
    threads: int,
) -> Delta:
    """The delta from old to the sources, cast to old's dtype; `payload` has room for all of old."""
    size, code = old.numel(), DTYPE_CODES[old.dtype]
    filled = [source for source in sources if source.numel()]
    starts = np.zeros(len(filled) + 1, np.int64)
    np.cumsum([source.numel() for source in filled], out=starts[1:])
    formats, offsets = np.zeros(count_blocks(size), np.uint8), np.zeros(count_blocks(size) + 1, np.int64)
    pointers = np.array([source.data_ptr() for source in filled], np.uint64)
    source_code = DTYPE_CODES[filled[0].dtype] if filled else code
    changed = lib.headway_delta_encode(
        pointers.ctypes.data,
        starts.ctypes.data,
        len(filled),
        source_code,
        code,
        old.data_ptr(),
        size,
        int(update),
        formats.ctypes.data,
        offsets.ctypes.data,
        payload.ctypes.data,
        threads,
    )
    return Delta(size, old.dtype, formats, offsets, payload[: int(offsets[-1])], changed)


def apply(lib: CDLL, delta: Delta, destination: Tensor, threads: int) -> None:
    """Writes the changed elements."""
    lib.headway_delta_apply(byref(_struct(delta)), destination.data_ptr(), threads)


def apply_slices(
    lib: CDLL, delta: Delta, table: SliceTable, destinations: Sequence[Tensor], threads: int
) -> None:
    """Writes the changed elements along the table, cast to each destination's dtype."""
    pointers = np.array([tensor.data_ptr() for tensor in destinations], np.uint64)
    dtypes = np.array([DTYPE_CODES[tensor.dtype] for tensor in destinations], np.int32)
    lib.headway_delta_apply_slices(
        byref(_struct(delta)),
        table.runs.ctypes.data,
        table.block_offsets.ctypes.data,
        table.block_runs.ctypes.data,
        pointers.ctypes.data,
        dtypes.ctypes.data,
        threads,
    )


def merge(lib: CDLL, older: Delta, newer: Delta, threads: int) -> Delta:
    """One delta with the effect of `older`, then `newer`."""
    num_blocks = older.num_blocks
    formats, offsets = np.zeros(num_blocks, np.uint8), np.zeros(num_blocks + 1, np.int64)
    room = num_blocks * BLOCK_ELEMENTS * value_type(older.dtype).itemsize + num_blocks * (BLOCK_ELEMENTS // 8)
    payload = np.empty(room, np.uint8)
    first, second = byref(_struct(older)), byref(_struct(newer))
    carried = lib.headway_delta_merge(
        first, second, formats.ctypes.data, offsets.ctypes.data, payload.ctypes.data, threads
    )
    changed = min(older.num_changed + newer.num_changed, carried)
    return Delta(older.num_elements, older.dtype, formats, offsets, payload[: int(offsets[-1])], changed)


def check(lib: CDLL, delta: Delta, threads: int) -> tuple[int, int, int]:
    """The first malformed block or -1, and the least and most elements that the blocks can have changed.

    The arrays' sizes and the offsets have been checked.
    """
    least, most = c_int64(), c_int64()
    bad = lib.headway_delta_check(byref(_struct(delta)), byref(least), byref(most), threads)
    return bad, least.value, most.value


def _struct(delta: Delta) -> DeltaStruct:
    """The C view of a delta; it lives as long as the delta, which keeps what it points to.

    Made once: with cold caches it takes longer than applying a few thousand changes does.
    """
    if not delta.views:
        offsets = np.require(delta.offsets, np.int64, ["C", "A"])  # from the wire it may lie anywhere
        struct = DeltaStruct(
            delta.formats.ctypes.data,
            offsets.ctypes.data,
            delta.payload.ctypes.data,
            delta.num_elements,
            DTYPE_CODES[delta.dtype],
        )
        delta.views.extend((struct, offsets))
    return delta.views[0]
