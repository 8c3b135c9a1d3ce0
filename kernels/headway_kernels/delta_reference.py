"""The weight delta in numpy: what the native back-ends must equal bit for bit.

Comes in: flat bit arrays. Goes out: encoded blocks, or changed destinations. Called by weight_delta.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from headway_kernels.delta_format import (
    BITMASK,
    BLOCK_ELEMENTS,
    DENSE,
    SAME,
    SPARSE,
    Bits,
    BlockFormat,
    Delta,
    block_length,
    count_blocks,
    merged_format,
    smallest_format,
    split_block,
    value_type,
)
from headway_kernels.slice_table import SliceTable, destination_indices


def bits_of(tensor: torch.Tensor) -> Bits:
    """The bits of a contiguous CPU tensor, flat, sharing its memory."""
    whole = torch.int32 if tensor.element_size() == 4 else torch.int16
    values: Bits = tensor.detach().view(-1).view(whole).numpy()
    return values.view(np.uint32 if tensor.element_size() == 4 else np.uint16)


def cast_bits(bits: Bits, source: torch.dtype, target: torch.dtype) -> Bits:
    """Bits of a value in another dtype; rounding and NaN rule as in weight_delta.cast_and_diff."""
    if source == target:
        return bits
    if source != torch.float32:
        wide = _widen(bits, source)
        return wide if target == torch.float32 else cast_bits(wide, torch.float32, target)
    return _to_bfloat16(bits) if target == torch.bfloat16 else _to_float16(bits)


def _widen(bits: Bits, source: torch.dtype) -> NDArray[np.uint32]:
    wide = bits.astype(np.uint32)
    if source == torch.bfloat16:
        return wide << np.uint32(16)
    nan = (bits & np.uint16(0x7FFF)) > np.uint16(0x7C00)
    exact = bits.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    sign, payload = wide >> np.uint32(15) << np.uint32(31), (wide & np.uint32(0x3FF)) << np.uint32(13)
    return np.where(nan, sign | np.uint32(0x7FC00000) | payload, exact)


def _to_bfloat16(bits: Bits) -> NDArray[np.uint16]:
    wide = bits.astype(np.uint64)
    high = wide >> np.uint64(16)
    rounded = (wide + np.uint64(0x7FFF) + (high & np.uint64(1))) >> np.uint64(16)
    nan = (wide & np.uint64(0x7FFFFFFF)) > np.uint64(0x7F800000)
    return np.where(nan, high | np.uint64(0x40), rounded).astype(np.uint16)


def _to_float16(bits: Bits) -> NDArray[np.uint16]:
    wide = bits.astype(np.uint32)
    nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.where(nan, np.uint32(0), wide).view(np.float32).astype(np.float16).view(np.uint16)
    quiet = (
        (wide >> np.uint32(16) & np.uint32(0x8000))
        | np.uint32(0x7E00)
        | (wide >> np.uint32(13) & np.uint32(0x3FF))
    )
    return np.where(nan, quiet.astype(np.uint16), rounded)


def encode(new: Bits, old: Bits, dtype: torch.dtype, payload: NDArray[np.uint8]) -> Delta:
    """Encodes where the bits differ into `payload`, which holds at least the bytes of `new`."""
    num_blocks = count_blocks(new.size)
    formats, offsets = np.zeros(num_blocks, np.uint8), np.zeros(num_blocks + 1, np.int64)
    at, num_changed = 0, 0
    for index in range(num_blocks):
        span = slice(index * BLOCK_ELEMENTS, index * BLOCK_ELEMENTS + block_length(new.size, index))
        positions = np.flatnonzero(new[span] != old[span])
        kind = smallest_format(span.stop - span.start, positions.size, new.itemsize)
        num_changed += positions.size
        formats[index] = kind
        for part in block_parts(kind, positions, new[span], span.stop - span.start):
            payload[at : at + part.nbytes] = part.view(np.uint8)
            at += part.nbytes
        offsets[index + 1] = at
    return Delta(new.size, dtype, formats, offsets, payload[:at], num_changed)


def block_parts(
    kind: BlockFormat, positions: NDArray[np.int64], block: Bits, length: int
) -> Iterator[NDArray[np.uint8] | Bits]:
    """The arrays that make up an encoded block: positions hold its changed elements, block all its new bits."""
    if kind == SAME:
        return
    if kind == DENSE:
        yield np.ascontiguousarray(block)
        return
    if kind == SPARSE:
        yield positions.astype(np.uint16)
    elif kind == BITMASK:
        marks = np.zeros(length, np.uint8)
        marks[positions] = 1
        yield np.packbits(marks, bitorder="little")
    yield block[positions]


def apply(delta: Delta, destination: Bits) -> None:
    """Writes the changed elements of a valid delta."""
    for index in np.flatnonzero(delta.formats):
        start = int(index) * BLOCK_ELEMENTS
        block = destination[start : start + block_length(delta.num_elements, int(index))]
        positions, values = split_block(delta, int(index))
        block[slice(None) if positions is None else positions] = values


def apply_slices(
    delta: Delta, table: SliceTable, destinations: list[Bits], dtypes: list[torch.dtype]
) -> None:
    """Writes the changed elements of a valid delta where the table says, cast to the destination's dtype."""
    for index in np.flatnonzero(delta.formats):
        positions, values = split_block(delta, int(index))
        if positions is None:
            positions = np.arange(values.size, dtype=np.int64)
        source = positions + int(index) * BLOCK_ELEMENTS
        for run in table.block_runs[table.block_offsets[index] : table.block_offsets[index + 1]]:
            inside, landing = destination_indices(table.runs[run], source)
            target = int(table.runs[run, 4])
            destinations[target][landing] = cast_bits(values[inside], delta.dtype, dtypes[target])


def merge(older: Delta, newer: Delta) -> Delta:
    """One delta with the effect of `older`, then `newer`; both valid, of one size and dtype."""
    num_blocks = older.num_blocks
    formats, offsets = np.zeros(num_blocks, np.uint8), np.zeros(num_blocks + 1, np.int64)
    parts: list[NDArray[np.uint8]] = []
    carried = 0
    for index in range(num_blocks):
        kind, count, block = _merge_block(older, newer, index)
        formats[index] = kind
        carried += count
        offsets[index + 1] = offsets[index] + sum(part.size for part in block)
        parts += block
    payload = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    changed = min(older.num_changed + newer.num_changed, carried)
    return Delta(older.num_elements, older.dtype, formats, offsets, payload, changed)


def _merge_block(older: Delta, newer: Delta, index: int) -> tuple[BlockFormat, int, list[NDArray[np.uint8]]]:
    length = block_length(older.num_elements, index)
    old_kind, new_kind = BlockFormat(int(older.formats[index])), BlockFormat(int(newer.formats[index]))
    if old_kind == SAME or new_kind in (SAME, DENSE):
        source = newer if old_kind == SAME or new_kind == DENSE else older
        positions, _ = split_block(source, index)
        count = length if positions is None else positions.size
        return BlockFormat(int(source.formats[index])), count, [source.block(index)]
    values = value_type(older.dtype)
    merged, touched = np.zeros(length, values), np.zeros(length, np.bool_)
    for delta in (older, newer):
        positions, bits = split_block(delta, index)
        where = slice(None) if positions is None else positions
        merged[where], touched[where] = bits, True
    positions = np.flatnonzero(touched)
    kind = merged_format(length, positions.size, values.itemsize)
    return (
        kind,
        positions.size,
        [part.view(np.uint8) for part in block_parts(kind, positions, merged, length)],
    )
