"""Weight deltas: cast the master weights, find what changed, encode it; apply it where the weights live.

Comes in: fp32 master weights and the published copy that they are cast into. Goes out: a Delta (delta_format.py
states its bytes), applied by a receiver to a flat tensor or along a SliceTable. Called by headway.weights. Nothing
here keeps a snapshot: the published copy is the old value.

    delta = cast_and_diff(master, published)          # learner; published now holds the new values
    data = to_bytes(delta)
    delta = from_bytes(data)                          # receiver: checked completely
    apply_slices(delta, table, parameters)            # O(changed)

Bits are compared, not values: -0.0 differs from 0.0, and a NaN equals itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from ctypes import CDLL
from types import ModuleType
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_kernels import delta_format, delta_native, delta_reference, native
from headway_kernels.delta_checks import check_flat, check_tensor, given, room
from headway_kernels.delta_format import (
    BITMASK,
    BLOCK_ELEMENTS,
    DENSE,
    DTYPE_CODES,
    SAME,
    SPARSE,
    BlockFormat,
    Delta,
    byte_parts,
    count_blocks,
    to_bytes,
)
from headway_kernels.errors import BackendUnavailable, ShapeError, UnsupportedOption
from headway_kernels.slice_table import Run, SliceTable

__all__ = [
    "BITMASK",
    "BLOCK_ELEMENTS",
    "DENSE",
    "SAME",
    "SPARSE",
    "BlockFormat",
    "Delta",
    "Run",
    "SliceTable",
    "apply_delta",
    "apply_slices",
    "byte_parts",
    "cast_and_diff",
    "diff",
    "from_bytes",
    "merge",
    "to_bytes",
    "validate",
    "whole",
]

Backend = Literal["auto", "cuda", "cpu", "reference"]


def cast_and_diff(
    master: Tensor | Sequence[Tensor],
    published: Tensor,
    *,
    payload: NDArray[np.uint8] | None = None,
    backend: Backend = "auto",
) -> Delta:
    """Casts master to published's dtype, encodes where the bits differ, and leaves the new bits in published.

    Rounds to the nearest, ties to even, subnormals included. A NaN keeps its sign and the upper bits of its payload
    and becomes quiet (bfloat16: bits >> 16 | 0x40; float16: sign | 0x7E00 | payload >> 13), as the processors'
    conversions do; float32 is copied bit for bit.

    Args:
        master: float32, contiguous, N elements: one tensor, or several whose elements follow each other.
        published: bfloat16, float16 or float32 [N], contiguous; written in place.
        payload: uint8 buffer of at least the bytes of `published` to encode into (in shared memory, say); the
            delta's payload is then a view of its front. None: a new one; pages that are not used cost no memory.
        backend: "cuda" is for tensors on a GPU, "cpu" the native library, "reference" numpy.

    Returns:
        The delta from the old published to the new.

    Raises:
        ShapeError: sizes, dtypes, layout or the buffer do not fit.
        UnsupportedOption, BackendUnavailable: an unknown or missing back-end.
    """
    pieces = [master] if isinstance(master, Tensor) else list(master)
    on_cuda = _is_on_cuda(backend, published)
    check_flat("published", published, on_cuda)
    for piece in pieces:
        check_tensor("master", piece, (torch.float32,), on_cuda)
    count = sum(piece.numel() for piece in pieces)
    if count != published.numel():
        raise ShapeError(f"weight delta: master has {count} elements, published {published.numel()}")
    if on_cuda:
        return _cuda().encode_to_host(pieces, published, given(payload, published), update=True)
    buffer, lib = room(payload, published), _library(backend)
    if lib is not None:
        return delta_native.encode(lib, pieces, published, buffer, update=True, threads=_threads())
    parts = [delta_reference.bits_of(piece) for piece in pieces]
    bits = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, np.uint32)])
    new, old = (
        delta_reference.cast_bits(bits, torch.float32, published.dtype),
        delta_reference.bits_of(published),
    )
    delta = delta_reference.encode(new, old, published.dtype, buffer)
    old[...] = new
    return delta


def diff(
    new: Tensor,
    old: Tensor,
    *,
    payload: NDArray[np.uint8] | None = None,
    update: bool = False,
    backend: Backend = "auto",
) -> Delta:
    """The delta from old to new, of one dtype; with update, old is overwritten by new in the same pass.

    Args:
        new, old: bfloat16, float16 or float32 [N], contiguous; payload, backend: as in cast_and_diff.

    Raises:
        ShapeError, UnsupportedOption, BackendUnavailable: as in cast_and_diff.
    """
    on_cuda = _is_on_cuda(backend, old)
    check_flat("new", new, on_cuda)
    check_flat("old", old, on_cuda)
    if new.dtype != old.dtype or new.shape != old.shape:
        raise ShapeError(
            f"weight delta: new is {new.dtype} {list(new.shape)}, old {old.dtype} {list(old.shape)}; expected alike"
        )
    if on_cuda:
        return _cuda().encode_to_host([new], old, given(payload, new), update=update)
    buffer, lib = room(payload, new), _library(backend)
    if lib is not None:
        return delta_native.encode(lib, [new], old, buffer, update=update, threads=_threads())
    new_bits, old_bits = delta_reference.bits_of(new), delta_reference.bits_of(old)
    delta = delta_reference.encode(new_bits, old_bits, new.dtype, buffer)
    if update:
        old_bits[...] = new_bits
    return delta


def whole(values: Tensor) -> Delta:
    """A whole state as a delta of dense blocks; its payload is the memory of `values` itself, not a copy.

    Args:
        values: bfloat16, float16 or float32 [N], contiguous.
    """
    check_flat("values", values, False)
    size, num_blocks = values.numel(), count_blocks(values.numel())
    payload = delta_reference.bits_of(values).view(np.uint8)
    offsets = (
        np.minimum(np.arange(num_blocks + 1, dtype=np.int64) * BLOCK_ELEMENTS, size) * values.element_size()
    )
    return Delta(size, values.dtype, np.full(num_blocks, DENSE, np.uint8), offsets, payload, size)


def apply_delta(delta: Delta, destination: Tensor, *, backend: Backend = "auto") -> None:
    """Writes the changed elements into a tensor of the delta's size and dtype, in place.

    Args:
        delta: valid (from cast_and_diff, merge or from_bytes): its bounds are not checked again.
        destination: [N] or any contiguous shape of N elements.

    Raises:
        ShapeError: size, dtype or layout do not fit.
        UnsupportedOption, BackendUnavailable: as in cast_and_diff.
    """
    on_cuda = _is_on_cuda(backend, destination)
    check_tensor("destination", destination, (delta.dtype,), on_cuda)
    if destination.numel() != delta.num_elements:
        raise ShapeError(
            f"weight delta: destination has {destination.numel()} elements, delta {delta.num_elements}"
        )
    if on_cuda:
        _cuda().apply_delta(delta, destination)
        return
    lib = _library(backend)
    if lib is not None:
        delta_native.apply(lib, delta, destination, _threads())
        return
    delta_reference.apply(delta, delta_reference.bits_of(destination))


def apply_slices(
    delta: Delta,
    table: SliceTable,
    destinations: Sequence[Tensor],
    *,
    cast: bool = False,
    backend: Backend = "auto",
) -> None:
    """Writes the changed elements where the table says.

    Args:
        delta: valid, of the table's size.
        table: of runs; see slice_table.py.
        destinations: contiguous tensors of the table's sizes; parameters are written in place.
        cast: allow destinations of another dtype than the delta's; values are cast as in cast_and_diff.

    Raises:
        ShapeError: sizes or layouts do not fit, or a dtype differs and cast is False.
        UnsupportedOption, BackendUnavailable: as in cast_and_diff.
    """
    if table.num_elements != delta.num_elements:
        raise ShapeError(f"weight delta: of {delta.num_elements} elements, the table of {table.num_elements}")
    table.check_destinations(destinations)
    allowed = tuple(DTYPE_CODES) if cast else (delta.dtype,)
    on_cuda = _is_on_cuda(backend, *destinations)
    for index, tensor in enumerate(destinations):
        check_tensor(f"destination {index}", tensor, allowed, on_cuda)
    if on_cuda:
        _cuda().apply_slices(delta, table, destinations, cast=cast)
        return
    lib = _library(backend)
    if lib is not None:
        delta_native.apply_slices(lib, delta, table, destinations, _threads())
        return
    dtypes = [tensor.dtype for tensor in destinations]
    delta_reference.apply_slices(
        delta, table, [delta_reference.bits_of(each) for each in destinations], dtypes
    )


def merge(older: Delta, newer: Delta, *, backend: Backend = "auto") -> Delta:
    """One delta with the effect of applying `older`, then `newer`: a skipped version is carried, never applied late.

    Where both change an element the newer value stays. num_changed of the result is an upper bound: an element that
    went back to its first value is still carried.

    Raises:
        ShapeError: the two are not of one size and dtype.
        UnsupportedOption, BackendUnavailable: as in cast_and_diff.
    """
    if older.num_elements != newer.num_elements or older.dtype != newer.dtype:
        raise ShapeError(
            f"weight delta: cannot merge {older.num_elements} {older.dtype} with {newer.num_elements} {newer.dtype}"
        )
    lib = _library(backend)
    if lib is not None:
        return delta_native.merge(lib, older, newer, _threads())
    return delta_reference.merge(older, newer)


def validate(delta: Delta, *, backend: Backend = "auto") -> None:
    """Refuses a delta that no encoder can have made; one pass over the payload. See delta_format.validate.

    Raises:
        MalformedDelta: names the first fault, with its block.
    """
    lib = _library(backend)
    if lib is None:
        delta_format.validate(delta)
        return
    delta_format.check_arrays(delta)
    bad, least, most = delta_native.check(lib, delta, _threads())
    if bad >= 0:
        delta_format.check_block(delta, bad)  # says what is wrong with it
        raise AssertionError(f"block {bad} was refused by the library and taken by the reference")
    delta_format.check_num_changed(delta.num_changed, least, most)


def from_bytes(
    data: bytes | bytearray | memoryview | NDArray[np.uint8], *, backend: Backend = "auto"
) -> Delta:
    """Reads what to_bytes wrote and validates it; the delta's arrays are views of `data`.

    Raises:
        MalformedDelta: names the first fault.
    """
    delta = delta_format.read_bytes(data)
    validate(delta, backend=backend)
    return delta


def _is_on_cuda(backend: str, *tensors: Tensor) -> bool:
    """Whether the CUDA kernels are asked for, or "auto" meets a tensor on a GPU."""
    return backend == "cuda" or (backend == "auto" and any(each.is_cuda for each in tensors))


def _cuda() -> ModuleType:
    return importlib.import_module("headway_kernels.cuda.host_delta")


def _library(backend: str) -> CDLL | None:
    """The native library, or None for the reference."""
    if backend not in ("auto", "cpu", "reference"):
        raise UnsupportedOption(
            f"weight delta: backend {backend!r}; expected 'auto', 'cpu' or 'reference' ('cuda' where tensors are given)"
        )
    lib = None if backend == "reference" else native.library()
    if lib is None and backend == "cpu":
        raise BackendUnavailable(f"weight delta: backend 'cpu' is not available: {native.why_not()}")
    return lib


def _threads() -> int:
    return torch.get_num_threads()
