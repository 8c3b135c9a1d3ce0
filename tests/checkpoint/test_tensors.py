"""Checkpoints' tensor files are safetensors: the library reads what we write, and we refuse what it would."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from headway.checkpoint import load, pieces
from headway.checkpoint.tensors import CHUNK_BYTES
from headway.errors import CheckpointError

ARRAYS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.c": np.array([-1, 2**40], np.int64),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(1.5, np.float32),
    "bytes": np.arange(7, dtype=np.uint8),
}


def write(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    path.write_bytes(b"".join(pieces(arrays, {"format": "pt"})))
    return path


def test_the_library_reads_what_we_write_and_we_read_what_it_writes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", ARRAYS)
    for found in (safetensors.numpy.load_file(path), load(path)):
        assert found.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)
    assert safetensors.torch.load_file(path)["a"].dtype == torch.float32
    safetensors.numpy.save_file(ARRAYS, tmp_path / "y.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "y.safetensors")["b.c"], ARRAYS["b.c"])


def test_nan_payloads_and_negative_zeros_survive(tmp_path: Path) -> None:
    bits = np.array([0x7FC00001, 0xFF800000, 0x80000000, 1], np.uint32).view(np.float32)
    path = write(tmp_path / "x.safetensors", {"x": bits})
    np.testing.assert_array_equal(load(path)["x"].view(np.uint32), bits.view(np.uint32))


def test_large_tensors_leave_in_pieces_that_alias_them(tmp_path: Path) -> None:
    array = np.zeros(CHUNK_BYTES // 4 + 5, np.float32)
    header, first, second = pieces({"x": array}, {})
    array[0] = 3.0
    assert (first.nbytes, second.nbytes) == (CHUNK_BYTES, 20)
    assert np.frombuffer(first[:4], np.float32)[0] == 3.0
    assert header.nbytes % 8 == 0


@pytest.mark.parametrize(
    ("entry", "data"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, b"\0" * 4),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, b"\0" * 8),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, b"\0" * 8),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, b"\0" * 8),
        ({"dtype": "O", "shape": [1], "data_offsets": [0, 8]}, b"\0" * 8),
        ({"dtype": "F32", "shape": "x", "data_offsets": [0, 8]}, b"\0" * 8),
        ([], b""),
    ],
)
def test_a_header_that_promises_what_is_not_there_is_refused(
    tmp_path: Path, entry: object, data: bytes
) -> None:
    text = json.dumps({"x": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\xff\0\0\0\0\0\0\0{", struct.pack("<Q", 2) + b"[]"])
def test_bytes_that_are_no_such_file_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        load(path)
