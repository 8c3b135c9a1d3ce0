"""Arrays as frames: a small head (dtype, shape) and the raw elements, C order, little endian.

Ownership: what `decode_array` and the codec return is read-only and never aliases memory that somebody can
still write. A `bytes` frame and a read-only memoryview are viewed without a copy (the array keeps the buffer
alive); a writable one, such as the buffer of a received zmq.Frame, is copied first.
What `encode_array` returns may alias the caller's array: send it before that array changes.

Sizes are Python ints throughout, so arrays beyond 2^31 bytes round-trip; a transport may cap a frame lower
(headway.wire.codec.Limits.max_frame_bytes).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.errors import WireError

Frame = bytes | memoryview

# bf16 has no numpy dtype: its bit patterns travel as uint16 under a name of their own.
DTYPES: dict[str, np.dtype[Any]] = {
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "fp32": np.dtype("<f4"),
    "fp16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "bool": np.dtype("bool"),
    "uint8": np.dtype("u1"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "bf16"}
MAX_DIMENSIONS = 8


class ArrayHead(msgspec.Struct, frozen=True, array_like=True):
    """How to read a frame: `dtype` is a key of DTYPES."""

    dtype: str
    shape: tuple[int, ...]


def encode_array(array: NDArray[Any], *, bf16: bool = False) -> tuple[ArrayHead, memoryview]:
    """The array's head and its elements as bytes, copied only when not little-endian C order already.

    Args:
        array: any strides and byte order; dtype one of DTYPES.
        bf16: `array` is uint16 holding bfloat16 bit patterns.

    Raises:
        WireError: "dtype" for any other dtype (object and structured ones included).
    """
    dtype = array.dtype.newbyteorder("<")
    if bf16:
        name = "bf16" if dtype == DTYPES["bf16"] else None
    else:
        name = _NAMES.get(dtype) if dtype.fields is None else None
    if name is None:
        known = "uint16 (bf16=True)" if bf16 else ", ".join(_NAMES.values())
        raise WireError("dtype", f"cannot send an array of dtype {array.dtype}; expected one of: {known}")
    shape = tuple(array.shape)
    flat = np.ascontiguousarray(array, dtype).reshape(-1)
    return ArrayHead(name, shape), flat.view(np.uint8).data


def decode_array(head: ArrayHead, frame: Frame) -> NDArray[Any]:
    """The array that `encode_array` described; read-only. bf16 comes back as uint16 bit patterns.

    Raises:
        WireError: "dtype", "shape" (negative, too many dimensions), "lengths" (shape and bytes disagree),
            "bool" (a byte that is neither 0 nor 1).
    """
    dtype = DTYPES.get(head.dtype)
    if dtype is None:
        raise WireError(
            "dtype", f"unknown array dtype {head.dtype[:40]!r}; expected one of {', '.join(DTYPES)}"
        )
    if len(head.shape) > MAX_DIMENSIONS or any(not 0 <= n < 1 << 62 for n in head.shape):
        raise WireError("shape", f"cannot read an array of shape {str(head.shape)[:80]}")
    flat = view(frame, dtype)
    if math.prod(head.shape) != flat.size:
        raise WireError(
            "lengths", f"shape {head.shape} needs {math.prod(head.shape)} elements, got {flat.size}"
        )
    if dtype == np.bool_:
        return as_bool(flat.view(np.uint8)).reshape(head.shape)
    return flat.reshape(head.shape)


def view(frame: Frame, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The frame's elements as a flat read-only array (see the module's note on ownership).

    Raises:
        WireError: "lengths" when the bytes are no whole number of elements.
    """
    private = frame if isinstance(frame, bytes) or frame.readonly else bytes(frame)
    size = private.nbytes if isinstance(private, memoryview) else len(private)
    if size % dtype.itemsize:
        raise WireError("lengths", f"{size} bytes are no whole number of {dtype} elements")
    return np.frombuffer(private, dtype)


def as_bool(flat: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """The same memory as bool, once every byte is known to be 0 or 1.

    Raises:
        WireError: "bool" otherwise; numpy's answers about a bool that is neither are undefined.
    """
    if flat.size and int(flat.max()) > 1:
        raise WireError("bool", f"a boolean byte is {int(flat.max())}; expected 0 or 1")
    return flat.view(np.bool_)


def plain_bytes(array: NDArray[Any], dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    """The array itself when it is flat, contiguous and of `dtype`; else a copy that is.

    Raises:
        WireError: "dtype" when the values would have to be converted, "shape" when it is not 1-d.
    """
    if array.dtype is dtype and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.dtype.newbyteorder("<") != dtype:
        raise WireError("dtype", f"{what} has dtype {array.dtype}; expected {dtype}")
    if array.ndim != 1:
        raise WireError("shape", f"{what} has shape {array.shape}; expected one dimension")
    return np.ascontiguousarray(array, dtype)
