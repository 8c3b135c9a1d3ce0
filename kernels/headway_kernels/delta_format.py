"""The encoding of a weight delta: which elements of a flat tensor changed, and to what bits.

Comes in: blocks of 65,536 elements, each encoded on its own. Goes out: three arrays, or one flat byte string for
the wire. Called by weight_delta.py and its back-ends; a receiver calls from_bytes and validate.

A block of L elements (L < 65,536 in the last block only), value size s = 2 or 4, n elements changed:

    SAME     nothing
    SPARSE   n u16 indices in the block, strictly ascending, then n values            n (2 + s) bytes
    BITMASK  ceil(L / 8) bytes, bit i of byte j is element 8 j + i, then n values     ceil(L / 8) + n s bytes
    DENSE    L values                                                                 L s bytes

Values are the new bits, little-endian, in the order of their elements. Blocks follow each other without padding, so
a value need not be aligned. An encoder takes the smallest format of a block, the first of equals in the order
above, so no encoded delta is larger than the tensor itself (a merged one by 1/8 byte an element at most); a reader
accepts any format.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway_kernels.errors import MalformedDelta, ShapeError

BLOCK_ELEMENTS = 65_536

Bits = NDArray[np.unsignedinteger[Any]]  # of values: uint16 or uint32


class BlockFormat(enum.IntEnum):
    """How a block is encoded."""

    SAME = 0
    SPARSE = 1
    BITMASK = 2
    DENSE = 3


SAME, SPARSE, BITMASK, DENSE = BlockFormat

DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_MAGIC = b"HWDELTA1"
_HEADER = struct.Struct("<8sB7xqqqq")  # magic, dtype, elements, changed, blocks, payload bytes
HEADER_BYTES = _HEADER.size

assert sys.byteorder == "little", "deltas are little-endian; a big-endian host would need to swap"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The changes that turn one flat tensor into another.

    Attributes:
        num_elements: N, of the tensor; blocks are cut from it in order.
        dtype: of the values: bfloat16, float16 or float32.
        formats: uint8 [num_blocks], BlockFormat of each block.
        offsets: int64 [num_blocks + 1], bytes into payload; block b is payload[offsets[b]:offsets[b + 1]].
        payload: uint8 [bytes]. May be a view of a buffer that the caller gave.
        num_changed: elements whose bits differ. A merged delta counts an upper bound (see merge).
    """

    num_elements: int
    dtype: torch.dtype
    formats: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    payload: NDArray[np.uint8]
    num_changed: int
    views: list[Any] = dataclasses.field(
        default_factory=list[Any], init=False, repr=False
    )  # delta_native's, made once

    @property
    def num_blocks(self) -> int:
        """Blocks of BLOCK_ELEMENTS elements; the last may be shorter."""
        return count_blocks(self.num_elements)

    @property
    def num_bytes(self) -> int:
        """Size of to_bytes(self)."""
        return (
            HEADER_BYTES
            + self.formats.nbytes
            + _padding(self.num_blocks)
            + self.offsets.nbytes
            + self.payload.nbytes
        )

    @property
    def changed_share(self) -> float:
        """num_changed / num_elements; 0 for an empty tensor."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0

    def block(self, index: int) -> NDArray[np.uint8]:
        """The bytes of one block."""
        return self.payload[int(self.offsets[index]) : int(self.offsets[index + 1])]


def count_blocks(num_elements: int) -> int:
    """Blocks that num_elements elements make."""
    return -(-num_elements // BLOCK_ELEMENTS)


def block_length(num_elements: int, index: int) -> int:
    """Elements of block `index`."""
    return min(BLOCK_ELEMENTS, num_elements - index * BLOCK_ELEMENTS)


def value_type(dtype: torch.dtype) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integer that holds the bits of a value.

    Raises:
        ShapeError: deltas do not exist for this dtype.
    """
    if dtype not in DTYPE_CODES:
        raise ShapeError(f"weight deltas are of bfloat16, float16 or float32; got {dtype}")
    return np.dtype(np.uint32) if dtype == torch.float32 else np.dtype(np.uint16)


def smallest_format(length: int, num_changed: int, value_bytes: int) -> BlockFormat:
    """The format of fewest bytes for a block of `length` elements of which `num_changed` changed."""
    if num_changed == 0:
        return SAME
    sizes = {
        SPARSE: num_changed * (2 + value_bytes),
        BITMASK: -(-length // 8) + num_changed * value_bytes,
        DENSE: length * value_bytes,
    }
    return min(sizes, key=lambda kind: (sizes[kind], kind))


def merged_format(length: int, num_carried: int, value_bytes: int) -> BlockFormat:
    """The format of a merged block: dense only where every value is known, for the base's are not at hand."""
    if num_carried == length:
        return smallest_format(length, num_carried, value_bytes)
    return SPARSE if 2 * num_carried <= -(-length // 8) else BITMASK


def split_block(delta: Delta, index: int) -> tuple[NDArray[np.int64] | None, Bits]:
    """Positions in the block and new bits of a block of a valid delta; positions None: all of them, in order."""
    kind = BlockFormat(int(delta.formats[index]))
    values, data = value_type(delta.dtype), delta.block(index)
    if kind == DENSE:
        return None, data.view(values)
    if kind == SPARSE:
        count = data.size // (2 + values.itemsize)
        return data[: 2 * count].view(np.uint16).astype(np.int64), data[2 * count :].view(values)
    if kind == BITMASK:
        length = block_length(delta.num_elements, index)
        mask = data[: -(-length // 8)]
        bits = np.unpackbits(mask, count=length, bitorder="little")
        return np.flatnonzero(bits), data[mask.size :].view(values)
    return np.zeros(0, np.int64), np.zeros(0, values)


def validate(delta: Delta) -> None:
    """Refuses whatever is not a delta that an encoder or merge can have made: it may come from the wire.

    A validated delta applies without further checks of bounds. Costs one pass over the payload.

    Raises:
        MalformedDelta: names the first fault, with the block.
    """
    check_arrays(delta)
    least, most = 0, 0
    for index, kind in enumerate(delta.formats.tolist()):
        count = check_block(delta, index)
        least += 0 if kind == DENSE else count
        most += count
    check_num_changed(delta.num_changed, least, most)


def check_block(delta: Delta, index: int) -> int:
    """The elements that a block of a delta with sound arrays carries. Raises as validate does."""
    try:
        kind, length = BlockFormat(int(delta.formats[index])), block_length(delta.num_elements, index)
        return _count_values(kind, delta.block(index), length, value_type(delta.dtype).itemsize)
    except ValueError as fault:
        raise MalformedDelta(f"weight delta: block {index} of {delta.num_blocks}: {fault}") from None


def check_num_changed(num_changed: int, least: int, most: int) -> None:
    """Refuses a count that the blocks contradict: a dense block hides how many of its elements changed."""
    if not least <= num_changed <= most:
        raise MalformedDelta(
            f"weight delta: num_changed is {num_changed}, but its blocks hold {least} to {most} changed elements"
        )


def check_arrays(delta: Delta) -> None:
    """What can be said of a delta without reading its payload."""
    if delta.dtype not in DTYPE_CODES:
        raise MalformedDelta(f"weight delta: dtype {delta.dtype}; expected bfloat16, float16 or float32")
    if delta.num_elements < 0:
        raise MalformedDelta(f"weight delta: num_elements is {delta.num_elements}")
    num_blocks = delta.num_blocks
    for name, array, dtype, size in (
        ("formats", delta.formats, np.uint8, num_blocks),
        ("offsets", delta.offsets, np.int64, num_blocks + 1),
        ("payload", delta.payload, np.uint8, None),
    ):
        contiguous = array.ndim == 1 and array.flags.c_contiguous
        if array.dtype != dtype or not contiguous or (size is not None and array.size != size):
            raise MalformedDelta(
                f"weight delta: {name} is {array.dtype} {list(array.shape)}; "
                f"expected contiguous {np.dtype(dtype).name} [{'bytes' if size is None else size}] "
                f"for {delta.num_elements} elements"
            )
    sizes = np.diff(delta.offsets)
    if delta.offsets[0] != 0 or (sizes < 0).any() or delta.offsets[-1] != delta.payload.size:
        raise MalformedDelta(
            "weight delta: offsets must rise from 0 to the payload's "
            f"{delta.payload.size} bytes; they go from {delta.offsets[0]} to {delta.offsets[-1]}"
            + (f" and fall after block {int((sizes < 0).argmax())}" if (sizes < 0).any() else "")
        )


def _count_values(kind: BlockFormat, data: NDArray[np.uint8], length: int, itemsize: int) -> int:
    """Values of one block. Raises ValueError with the fault."""
    if kind == SAME:
        if data.size:
            raise ValueError(f"an unchanged block has {data.size} bytes; expected 0")
        return 0
    if kind == DENSE:
        if data.size != length * itemsize:
            raise ValueError(
                f"a dense block of {length} values has {data.size} bytes; expected {length * itemsize}"
            )
        return length
    if kind == SPARSE:
        count, rest = divmod(data.size, 2 + itemsize)
        if rest or not 1 <= count <= length:
            raise ValueError(f"a sparse block of {length} elements has {data.size} bytes")
        indices = data[: 2 * count].view(np.uint16)
        if int(indices[-1]) >= length or (indices[1:] <= indices[:-1]).any():
            raise ValueError(f"sparse indices must be strictly ascending and below {length}")
        return count
    mask_bytes = -(-length // 8)
    mask = data[:mask_bytes]
    if mask.size < mask_bytes or (length % 8 and int(mask[-1]) >> length % 8):
        raise ValueError(
            f"the bitmask of a block of {length} elements is cut short or marks elements behind its end"
        )
    count = int(np.unpackbits(mask).sum(dtype=np.int64))
    if count == 0 or data.size != mask_bytes + count * itemsize:
        raise ValueError(
            f"a bitmask of {count} changed elements is followed by {data.size - mask_bytes} bytes of values"
        )
    return count


def _padding(num_blocks: int) -> int:
    return -num_blocks % 8


def to_bytes(delta: Delta) -> bytes:
    """The delta as one byte string: a header, formats, offsets, payload. from_bytes reads it back."""
    return b"".join(part if isinstance(part, bytes) else part.tobytes() for part in byte_parts(delta))


def byte_parts(delta: Delta) -> list[bytes | NDArray[np.uint8] | NDArray[np.int64]]:
    """The parts of to_bytes in order, without copying the arrays: frames of a message, or writev."""
    header = _HEADER.pack(
        _MAGIC,
        DTYPE_CODES[delta.dtype],
        delta.num_elements,
        delta.num_changed,
        delta.num_blocks,
        delta.payload.size,
    )
    return [header, delta.formats, bytes(_padding(delta.num_blocks)), delta.offsets, delta.payload]


def read_bytes(data: bytes | bytearray | memoryview | NDArray[np.uint8]) -> Delta:
    """A delta over views of `data`, its sizes checked but its content not: validate() before use.

    Raises:
        MalformedDelta: not a delta, or cut short, or followed by something else.
    """
    raw = np.frombuffer(data, np.uint8)
    if raw.size < HEADER_BYTES:
        raise MalformedDelta(f"weight delta: {raw.size} bytes; the header alone has {HEADER_BYTES}")
    magic, code, num_elements, num_changed, num_blocks, payload_bytes = _HEADER.unpack(
        raw[:HEADER_BYTES].tobytes()
    )
    if magic != _MAGIC or code not in _DTYPES:
        raise MalformedDelta(
            f"weight delta: starts with {magic!r} and dtype code {code}; expected {_MAGIC!r}"
        )
    if num_elements < 0 or num_changed < 0 or num_blocks != count_blocks(num_elements) or payload_bytes < 0:
        raise MalformedDelta(
            f"weight delta: {num_elements} elements, {num_changed} changed, {num_blocks} blocks, "
            f"{payload_bytes} payload bytes contradict each other"
        )
    at_offsets = HEADER_BYTES + num_blocks + _padding(num_blocks)
    at_payload = at_offsets + 8 * (num_blocks + 1)
    if raw.size != at_payload + payload_bytes:
        raise MalformedDelta(f"weight delta: {raw.size} bytes; its header says {at_payload + payload_bytes}")
    return Delta(
        num_elements=num_elements,
        dtype=_DTYPES[code],
        formats=raw[HEADER_BYTES : HEADER_BYTES + num_blocks],
        offsets=raw[at_offsets:at_payload].view(np.int64),
        payload=raw[at_payload:],
        num_changed=num_changed,
    )
