"""Gather, scatter, cast and quantise many tensors in one call, along a table that is made once.

    table = PackTable([Part(weight, bucket[0:n].view_as(weight)), ...])      # at start
    table.run()                                                              # every push

A part's source and target are matrices whose rows may lie apart; a flat tensor is a matrix of one row. Casts round to
nearest even and treat a NaN as weight_delta.cast_and_diff does; equal dtypes are copied bit for bit.

    "cast"       bfloat16, float16, float32 to each other
    "fp8_block"  e4m3 codes x / scale, one fp32 scale = max|x| / 448 for each 128 x 128 block, 1 for a block of zeros
    "fp8_mx"     e4m3 codes x / 2^e, one exponent for each 32 neighbours of a row, stored as e + 127:
                 e = floor(log2 max|x|) - 8, at least -127 (OCP Microscaling Formats v1.0)

Codes round to nearest even and end at +-448. A NaN becomes a NaN code; a block that holds a NaN or an infinity gets
the scale NaN (255 for fp8_mx) and nothing but NaN codes, so it cannot pass unseen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from ctypes import sizeof
from typing import Literal

import torch
from torch import Tensor

from headway_kernels import native, pack_reference
from headway_kernels.delta_format import DTYPE_CODES
from headway_kernels.errors import BackendUnavailable, ShapeError, UnsupportedOption
from headway_kernels.native import PackPartStruct

PackFormat = Literal["cast", "fp8_block", "fp8_mx"]
Backend = Literal["auto", "cuda", "cpu", "reference"]
FORMATS = ("cast", "fp8_block", "fp8_mx")
BLOCK_SIDE = 128
MX_LENGTH = 32
_CODE_DTYPES = (torch.uint8, torch.float8_e4m3fn)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One matrix to move.

    Attributes:
        source: [R, C] or [C] of bfloat16, float16 or float32; unit stride along the last dimension.
        target: the same shape; a float for "cast", uint8 or float8_e4m3fn for fp8. Not overlapping its source.
        format: one of FORMATS.
        scales: for fp8_block float32 [ceil(R / 128), ceil(C / 128)], for fp8_mx uint8 [R, ceil(C / 32)],
            contiguous; else None.
    """

    source: Tensor
    target: Tensor
    format: PackFormat = "cast"
    scales: Tensor | None = None


class PackTable:
    """Parts on one device, checked once; keeps their tensors alive.

    Args:
        parts: their targets must not overlap.
        backend: "cpu" is the native library, "reference" numpy and PyTorch, "cuda" for tensors on a GPU.

    Attributes:
        backend: what runs it.
        num_bytes: read and written by one run.

    Raises:
        ShapeError: shapes, dtypes, strides or devices do not fit.
        UnsupportedOption, BackendUnavailable: an unknown format or back-end; a missing back-end.
    """

    def __init__(self, parts: Sequence[Part], *, backend: Backend = "auto") -> None:
        self._parts = tuple(parts)
        for part in self._parts:
            _check(part)
        devices = {tensor.device for part in self._parts for tensor in _tensors(part)}
        if len(devices) > 1:
            raise ShapeError(
                f"pack_cast: parts are on several devices: {', '.join(sorted(map(str, devices)))}"
            )
        self.backend = _choose(backend, next(iter(devices), torch.device("cpu")))
        self.num_bytes = sum(map(_moved_bytes, self._parts))
        self._structs = (PackPartStruct * len(self._parts))()
        self._cuda = None
        if self.backend == "cuda":
            from headway_kernels.cuda.pack_cast import DeviceParts

            self._cuda = DeviceParts(self._parts)
        elif self.backend == "cpu":
            self._structs = (PackPartStruct * len(self._parts))(
                *(PackPartStruct(**struct_fields(part)) for part in self._parts)
            )

    def run(self) -> None:
        """Moves every part; on CUDA enqueues one launch on the current stream."""
        if self._cuda is not None:
            self._cuda.run()
            return
        if self.backend == "reference":
            for part in self._parts:
                pack_reference.move(part.source.detach(), part.target.detach(), part.format, part.scales)
            return
        lib = native.library()
        assert lib is not None, "chosen only where it is available"
        lib.headway_pack_cast(self._structs, len(self._parts), torch.get_num_threads())


def scale_shape(source: Tensor, layout: PackFormat) -> tuple[int, int]:
    """Shape of the scales of a source [R, C] or [C] in an fp8 format."""
    rows, columns = source.shape if source.dim() == 2 else (1, source.shape[0])
    if layout == "fp8_block":
        return -(-rows // BLOCK_SIDE), -(-columns // BLOCK_SIDE)
    return rows, -(-columns // MX_LENGTH)


def _choose(backend: str, device: torch.device) -> str:
    if backend not in ("auto", "cuda", "cpu", "reference"):
        raise UnsupportedOption(
            f"pack_cast: backend {backend!r}; expected 'auto', 'cuda', 'cpu' or 'reference'"
        )
    if device.type == "cuda" or backend == "cuda":
        if backend not in ("auto", "cuda"):
            raise UnsupportedOption(f"pack_cast: backend {backend!r} lacks tensors on {device}; use 'cuda'")
        return "cuda"
    if device.type != "cpu":
        raise UnsupportedOption(f"pack_cast: tensors are on {device}; expected the CPU or a CUDA device")
    if backend == "cpu" and not native.available():
        raise BackendUnavailable(f"pack_cast: backend 'cpu' is not available: {native.why_not()}")
    return "cpu" if backend != "reference" and native.available() else "reference"


def _check(part: Part) -> None:
    if part.format not in FORMATS:
        raise UnsupportedOption(f"pack_cast: format {part.format!r}; choose from {', '.join(FORMATS)}")
    if part.source.shape != part.target.shape or part.source.dim() not in (1, 2):
        raise ShapeError(
            f"pack_cast: source {list(part.source.shape)}, target {list(part.target.shape)}; "
            "expected one shape [C] or [R, C]"
        )
    floats = tuple(DTYPE_CODES)
    for name, tensor, dtypes in (
        ("source", part.source, floats),
        ("target", part.target, floats if part.format == "cast" else _CODE_DTYPES),
    ):
        if tensor.dtype not in dtypes or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
            raise ShapeError(
                f"pack_cast: {name} is {tensor.dtype} with strides {tensor.stride()}; "
                f"expected {' or '.join(map(str, dtypes))} with unit stride along the last dimension"
            )
    if part.format == "cast":
        if part.scales is not None:
            raise UnsupportedOption("pack_cast: format 'cast' writes no scales; leave them out")
        return
    shape, dtype = scale_shape(part.source, part.format), torch.float32
    if part.format == "fp8_mx":
        dtype = torch.uint8
    scales = part.scales
    if scales is None or tuple(scales.shape) != shape or scales.dtype != dtype or not scales.is_contiguous():
        got = "None" if scales is None else f"{scales.dtype} {list(scales.shape)}"
        raise ShapeError(
            f"pack_cast: scales are {got}; expected contiguous {dtype} {list(shape)} for {part.format!r}"
        )


def struct_fields(part: Part) -> dict[str, int | None]:
    """A checked part as the C structs of both libraries have it; a contiguous cast is one long row."""
    rows, columns = part.source.shape if part.source.dim() == 2 else (1, part.source.shape[0])
    source_stride, target_stride = _row_stride(part.source), _row_stride(part.target)
    if part.format == "cast" and source_stride == target_stride == columns:
        rows, columns = 1, rows * columns  # narrow rows would leave lanes and threads idle
        source_stride = target_stride = columns
    return {
        "source": part.source.data_ptr(),
        "target": part.target.data_ptr(),
        "scales": None if part.scales is None else part.scales.data_ptr(),
        "rows": rows,
        "columns": columns,
        "source_stride": source_stride,
        "target_stride": target_stride,
        "scale_stride": 0 if part.scales is None else part.scales.shape[1],
        "source_dtype": DTYPE_CODES[part.source.dtype],
        "target_dtype": DTYPE_CODES.get(part.target.dtype, 0),
        "format": FORMATS.index(part.format),
    }


def _row_stride(tensor: Tensor) -> int:
    if tensor.dim() == 2 and tensor.shape[0] > 1:
        return tensor.stride(0)
    return tensor.shape[-1]


def _moved_bytes(part: Part) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(part))


def _tensors(part: Part) -> list[Tensor]:
    return [part.source, part.target, *([] if part.scales is None else [part.scales])]


assert sizeof(PackPartStruct) == 80, "HeadwayPackPart of csrc/headway_cpu.h"
