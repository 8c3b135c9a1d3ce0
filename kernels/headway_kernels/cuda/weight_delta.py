"""Weight deltas on CUDA: csrc/cuda/weight_delta.cu; bit for bit what delta_reference.py gives.

    device = encode(pieces, published, update=True)     # marks, formats, offsets and payload stay on the GPU
    delta = device.to_host()                            # a delta_format.Delta, for the wire
    apply(DeviceDelta.from_host(delta, gpu), tensor)    # receiver

Called by a learner or generator whose weights are on a GPU. encode waits for the GPU once: the payload's size is only
known when everything has been compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headway_kernels.cuda.library import Library, library, require
from headway_kernels.delta_format import BLOCK_ELEMENTS, DTYPE_CODES, Delta, count_blocks
from headway_kernels.errors import ShapeError
from headway_kernels.slice_table import SliceTable

_VALUE_DTYPES = tuple(DTYPE_CODES)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DeviceDelta:
    """A Delta (delta_format.py) whose arrays are tensors on one device.

    Attributes:
        num_elements, dtype, num_changed: as in Delta.
        formats: uint8 [num_blocks]. offsets: int64 [num_blocks + 1]. payload: uint8 [offsets[-1]].
    """

    num_elements: int
    dtype: torch.dtype
    formats: Tensor
    offsets: Tensor
    payload: Tensor
    num_changed: int

    def to_host(self) -> Delta:
        """A copy on the CPU; waits for it."""
        formats, offsets, payload = (
            each.cpu().numpy() for each in (self.formats, self.offsets, self.payload)
        )
        return Delta(self.num_elements, self.dtype, formats, offsets, payload, self.num_changed)

    @staticmethod
    def from_host(delta: Delta, device: torch.device | str) -> DeviceDelta:
        """A copy of a valid delta on the device."""
        formats, offsets, payload = (
            torch.from_numpy(np.array(each)).to(device)
            for each in (delta.formats, delta.offsets, delta.payload)
        )
        return DeviceDelta(delta.num_elements, delta.dtype, formats, offsets, payload, delta.num_changed)


def encode(pieces: Sequence[Tensor], old: Tensor, *, update: bool) -> DeviceDelta:
    """The delta from `old` to the pieces, whose elements follow each other, cast to old's dtype.

    Args:
        pieces: contiguous; all fp32, or all of old's dtype.
        old: bfloat16, float16 or float32 [N], contiguous.
        update: leave the new bits in `old`. Without it the pieces must be one tensor of old's dtype.

    Raises:
        ShapeError: sizes, dtypes, layouts or devices do not fit.
        BackendUnavailable: no library, or no GPU.
    """
    lib = library()
    source = _check_pieces(lib, pieces, old, update)
    size, device, num_blocks = old.numel(), old.device, count_blocks(old.numel())
    filled = [piece for piece in pieces if piece.numel()]
    pointers, starts = piece_table(filled, device)
    marks = torch.empty(num_blocks * (BLOCK_ELEMENTS // 8), dtype=torch.uint8, device=device)
    counts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    formats = torch.empty(num_blocks, dtype=torch.uint8, device=device)
    sizes = torch.empty(num_blocks + 2, dtype=torch.int64, device=device)
    offsets, changed = sizes[:-1], sizes[-1:]
    code, where = DTYPE_CODES[old.dtype], (0, num_blocks)
    lib.call(
        "delta_compare", device, pointers, starts, len(filled), DTYPE_CODES[source], old, code, size, int(update),
        *where, marks, counts,
    )  # fmt: skip
    lib.call("delta_layout", device, counts, size, code, formats, offsets, changed)
    num_bytes, num_changed = (int(each) for each in sizes[-2:].tolist())
    payload = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    values = old if update or not filled else filled[0]
    lib.call("delta_encode", device, values, code, size, marks, formats, offsets, *where, payload)
    return DeviceDelta(size, old.dtype, formats, offsets, payload, num_changed)


def apply(delta: DeviceDelta, destination: Tensor) -> None:
    """Writes the changed elements into a contiguous tensor of the delta's size and dtype.

    Raises:
        ShapeError: size, dtype, layout or device do not fit.
    """
    lib = library()
    require("destination", destination, (delta.dtype,), lib)
    if destination.numel() != delta.num_elements:
        raise ShapeError(f"destination has {destination.numel()} elements, the delta {delta.num_elements}")
    lib.call(
        "delta_apply", destination.device, delta.formats, delta.offsets, delta.payload, DTYPE_CODES[delta.dtype],
        delta.num_elements, 0, count_blocks(delta.num_elements), destination,
    )  # fmt: skip


class DeviceTable:
    """A SliceTable and its destinations on a device, made once; apply_slices then uploads nothing.

    Args:
        table: of runs. destinations: contiguous tensors of the table's sizes, on one device, kept alive here.

    Raises:
        ShapeError: sizes, dtypes, layouts or devices do not fit.
    """

    def __init__(self, table: SliceTable, destinations: Sequence[Tensor]) -> None:
        table.check_destinations(destinations)
        lib = library()
        for index, tensor in enumerate(destinations):
            require(f"destination {index}", tensor, _VALUE_DTYPES, lib)
        if len({tensor.device for tensor in destinations}) > 1:
            raise ShapeError(
                f"destinations are on several devices: {sorted({str(each.device) for each in destinations})}"
            )
        self.destinations = tuple(destinations)
        self.num_elements = table.num_elements
        self.dtypes = {tensor.dtype for tensor in destinations}
        device = destinations[0].device if destinations else torch.device("cpu")

        def upload(array: object) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.runs = upload(table.runs)
        self.reciprocals = upload(1.0 / table.runs[:, 3].astype(np.float64))
        self.block_offsets, self.block_runs = upload(table.block_offsets), upload(table.block_runs)
        self.pointers = upload(np.array([tensor.data_ptr() for tensor in destinations], np.int64))
        self.codes = upload(np.array([DTYPE_CODES[tensor.dtype] for tensor in destinations], np.int32))


def apply_slices(delta: DeviceDelta, table: DeviceTable, *, cast: bool = False) -> None:
    """Writes the changed elements where the table says.

    Args:
        cast: allow destinations of another dtype than the delta's.

    Raises:
        ShapeError: the sizes differ, or a dtype does and cast is False.
    """
    if table.num_elements != delta.num_elements:
        raise ShapeError(f"the delta has {delta.num_elements} elements, the table {table.num_elements}")
    if not cast and table.dtypes - {delta.dtype}:
        raise ShapeError(
            f"destinations are {table.dtypes}, the delta {delta.dtype}; pass cast=True to convert"
        )
    library().call(
        "delta_apply_slices", delta.payload.device, delta.formats, delta.offsets, delta.payload,
        DTYPE_CODES[delta.dtype], delta.num_elements, table.runs, table.reciprocals, table.block_offsets,
        table.block_runs, table.pointers, table.codes, 0, count_blocks(delta.num_elements),
    )  # fmt: skip


def piece_table(pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pointers int64 [P] and first elements int64 [P + 1] of pieces, on the device."""
    starts = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([piece.numel() for piece in pieces], out=starts[1:])
    pointers = torch.tensor([piece.data_ptr() for piece in pieces], dtype=torch.int64)
    return pointers.to(device), torch.from_numpy(starts).to(device)


def _check_pieces(lib: Library, pieces: Sequence[Tensor], old: Tensor, update: bool) -> torch.dtype:
    """The pieces' dtype."""
    require("old", old, _VALUE_DTYPES, lib)
    source = pieces[0].dtype if pieces else old.dtype
    for piece in pieces:
        require("a piece", piece, (source,), lib)
        if piece.device != old.device:
            raise ShapeError(f"a piece is on {piece.device}, old on {old.device}")
    if source not in (torch.float32, old.dtype):
        raise ShapeError(f"pieces are {source}; expected float32 or {old.dtype}, which old is")
    count = sum(piece.numel() for piece in pieces)
    if count != old.numel():
        raise ShapeError(f"the pieces have {count} elements, old {old.numel()}")
    if not update and (len(pieces) != 1 or source != old.dtype):
        raise ShapeError(
            f"without update the new values are one {old.dtype} tensor; got {len(pieces)} of {source}"
        )
    return source
