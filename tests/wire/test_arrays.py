"""Arrays survive the wire bit for bit, whatever their layout, and what arrives cannot be written through."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headway.errors import WireError
from headway.wire.arrays import DTYPES, ArrayHead, decode_array, encode_array

ELEMENTS = {
    "int32": "i4",
    "int64": "i8",
    "fp32": "f4",
    "fp16": "f2",
    "bf16": "u2",
    "bool": "?",
    "uint8": "u1",
}


@st.composite
def any_layout(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    name = draw(st.sampled_from(sorted(ELEMENTS)))
    base = np.dtype(ELEMENTS[name])
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    raw = draw(
        st.binary(min_size=math.prod(shape) * base.itemsize, max_size=math.prod(shape) * base.itemsize)
    )
    # Raw bits rather than values: NaN payloads and -0.0 are what a careless codec loses.
    array = np.frombuffer(bytes(b & 1 for b in raw) if name == "bool" else raw, base).reshape(shape)
    layout = draw(st.sampled_from(["C", "F", "reversed", "strided", "big"]))
    if layout == "F":
        array = np.asfortranarray(array)
    elif layout == "reversed" and array.ndim:
        array = array[::-1]
    elif layout == "strided" and array.ndim:
        array = np.repeat(array, 2, axis=array.ndim - 1)[..., ::2]
    elif layout == "big":
        array = (
            array.astype(base.newbyteorder(">"))
            if base.kind in "iu"
            else array.byteswap().view(base.newbyteorder(">"))
        )
    return name, array


@given(any_layout())
def test_bits_survive_in_every_dtype_and_layout(case: tuple[str, np.ndarray]) -> None:
    name, array = case
    head, frame = encode_array(array, bf16=name == "bf16")
    received = decode_array(head, bytes(frame))
    little = array.dtype.newbyteorder("<")
    expected = array.byteswap().view(little) if array.dtype.byteorder == ">" else array
    assert head.dtype == name
    assert received.shape == array.shape
    assert received.dtype == little
    assert received.tobytes() == expected.tobytes()


def test_frames_are_little_endian_and_c_order() -> None:
    head, frame = encode_array(np.asfortranarray(np.array([[1, 2], [3, 4]], dtype=">i4")))
    assert head == ArrayHead("int32", (2, 2))
    assert bytes(frame) == b"".join(n.to_bytes(4, "little") for n in (1, 2, 3, 4))


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f4")]),
        np.array(["text"]),
        np.zeros(2, dtype=np.complex64),
        np.zeros(2, dtype="datetime64[s]"),
        np.zeros(2, dtype=np.float64),
    ],
    ids=["object", "structured", "text", "complex", "datetime", "float64"],
)
def test_other_dtypes_are_refused_not_converted(array: np.ndarray) -> None:
    with pytest.raises(WireError) as caught:
        encode_array(array)
    assert caught.value.reason == "dtype"


def test_bf16_takes_bit_patterns_only() -> None:
    with pytest.raises(WireError, match="uint16"):
        encode_array(np.zeros(2, dtype=np.float32), bf16=True)
    head, frame = encode_array(np.array([0x3F80, 0x7FC1], dtype=np.uint16), bf16=True)
    assert head.dtype == "bf16"
    assert decode_array(head, bytes(frame)).tolist() == [0x3F80, 0x7FC1]


def test_received_arrays_are_read_only_and_never_alias_writable_memory() -> None:
    head, frame = encode_array(np.arange(4, dtype=np.int32))
    buffer = bytearray(frame)
    received = decode_array(head, memoryview(buffer))
    buffer[:] = b"\xff" * len(buffer)
    assert received.tolist() == [0, 1, 2, 3]
    assert not received.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        received[0] = 1
    data = bytes(frame)
    shared = decode_array(head, data)
    assert np.shares_memory(shared, np.frombuffer(data, np.uint8))


def test_more_than_two_gib() -> None:
    size = (1 << 31) + 24
    array = np.zeros(size, dtype=np.uint8)  # untouched pages cost nothing
    array[-1] = 7
    head, frame = encode_array(array)
    assert head.shape == (size,)
    received = decode_array(head, frame.toreadonly())
    assert received.nbytes == size
    assert received[-1] == 7
    assert np.shares_memory(received[-1:], array[-1:])


@pytest.mark.parametrize(
    ("head", "frame", "reason"),
    [
        (ArrayHead("int32", (2,)), b"\0" * 7, "lengths"),
        (ArrayHead("int32", (2,)), b"\0" * 12, "lengths"),
        (ArrayHead("int32", (1 << 40, 1 << 40)), b"", "lengths"),
        (ArrayHead("int32", (-1, -2)), b"\0" * 8, "shape"),
        (ArrayHead("int32", (1,) * 9), b"\0" * 4, "shape"),
        (ArrayHead("object", (1,)), b"\0" * 8, "dtype"),
        (ArrayHead("bool", (2,)), b"\1\2", "bool"),
    ],
)
def test_heads_that_do_not_fit_their_frame_are_refused(head: ArrayHead, frame: bytes, reason: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_array(head, frame)
    assert caught.value.reason == reason


def test_every_documented_dtype_is_covered() -> None:
    assert set(DTYPES) == set(ELEMENTS)
