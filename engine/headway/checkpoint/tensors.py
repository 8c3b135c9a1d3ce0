"""Safetensors files, written piece by piece and read with every length checked. No torch: arrays in, arrays out.

The format is public (8 bytes length, a JSON header, then the raw data), so that any tool that knows safetensors
reads a checkpoint. The library's own writer would hold a second copy of all tensors while it writes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import CheckpointError

CHUNK_BYTES = 16 << 20
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 64 << 20
_NAMES = {np.dtype("<f4"): "F32", np.dtype("<i4"): "I32", np.dtype("<i8"): "I64", np.dtype("u1"): "U8"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

Arrays = Mapping[str, NDArray[Any]]


def pieces(arrays: Arrays, metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The file's bytes in pieces of at most CHUNK_BYTES; the data's alias the arrays.

    Args:
        arrays: by name; contiguous, float32, int32, int64 or uint8.
        metadata: for whoever looks at the file.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in arrays.items():
        assert array.flags.c_contiguous, name
        end = offset + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(_LENGTH.pack(len(text)) + text)
    for array in arrays.values():
        view = memoryview(array.reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]
        for start in range(0, view.nbytes, CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def load(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file, read-only and mapped: nothing is read before it is used.

    Raises:
        CheckpointError: not such a file, or its header says what its bytes do not hold.
    """
    try:
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > _MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        size = path.stat().st_size - _LENGTH.size - length
        header.pop("__metadata__", None)
        data = np.memmap(path, np.uint8, "r", offset=_LENGTH.size + length, shape=(size,)) if size else None
        return {name: _array(data, size, entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, struct.error, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file of a checkpoint: {error}") from None


def _array(data: NDArray[np.uint8] | None, size: int, entry: dict[str, Any]) -> NDArray[Any]:
    dtype, shape = _DTYPES[entry["dtype"]], [int(extent) for extent in entry["shape"]]
    start, end = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= start <= end <= size or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets {start} to {end} of {size} bytes do not hold {entry['dtype']} {shape}")
    if data is None or start == end:
        return np.zeros(shape, dtype)
    return data[start:end].view(dtype).reshape(shape)
