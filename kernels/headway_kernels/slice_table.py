"""Where the elements of a flat source tensor live in destination tensors: the table that deltas are applied along.

Comes in: runs, one per stretch of the source that lands somewhere with constant strides. Goes out: a checked table,
sorted and indexed by block, that weight_delta.apply_slices and pack_cast read. Made once at start by headway.weights.

One Run covers what model loaders do:
    a plain parameter       Run(source_start, rows=1, row_length=n, destination, destination_offset)
    fused (qkv, gate-up)    the same: a part of a larger destination
    tied                    two runs over the same source elements
    sharded on dimension 0  the same as plain, with another source_start
    sharded on dimension 1  rows=out, row_length=columns kept, source_stride=columns of the source
    transposed [r, c]       rows=r, row_length=c, row_stride=1, column_stride=r
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from headway_kernels.delta_format import BLOCK_ELEMENTS, count_blocks
from headway_kernels.errors import ShapeError


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A matrix of elements: source element source_start + r source_stride + c goes to element
    destination_offset + r row_stride + c column_stride of a destination, r < rows, c < row_length.

    All counts are elements. A stride of 0 takes what makes the side contiguous: row_length for source_stride,
    row_length * column_stride for row_stride.
    """

    source_start: int
    row_length: int
    destination: int
    destination_offset: int
    rows: int = 1
    source_stride: int = 0
    row_stride: int = 0
    column_stride: int = 1


FIELDS = (
    "source_start",
    "rows",
    "row_length",
    "source_stride",
    "destination",
    "destination_offset",
    "row_stride",
    "column_stride",
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SliceTable:
    """Runs in order of their source, and which of them touch each block. Build with SliceTable.build.

    Attributes:
        num_elements: N, of the source.
        destination_elements: int64 [num_destinations], size of each destination.
        runs: int64 [num_runs, 8], columns as in FIELDS, no stride 0.
        block_offsets: int64 [num_blocks + 1]; block_runs: int64 [block_offsets[-1]], rows of `runs`.
    """

    num_elements: int
    destination_elements: NDArray[np.int64]
    runs: NDArray[np.int64]
    block_offsets: NDArray[np.int64]
    block_runs: NDArray[np.int64]

    @staticmethod
    def build(num_elements: int, destination_elements: Sequence[int], runs: Sequence[Run]) -> SliceTable:
        """Checks and indexes the runs. A source element that no run covers is not applied anywhere.

        Raises:
            ShapeError: a run leaves its source or destination, or two write the same destination element.
        """
        sizes = np.asarray(destination_elements, np.int64).reshape(-1)
        table = np.array([_resolve(run) for run in runs], np.int64).reshape(-1, len(FIELDS))
        table = table[np.argsort(table[:, 0], kind="stable")]
        if num_elements < 0 or (sizes < 0).any():
            raise ShapeError(
                f"slice table: sizes must not be negative; got {num_elements} and {sizes.tolist()}"
            )
        _check_bounds(table, num_elements, sizes)
        _check_disjoint(table, sizes)
        offsets, members = _index_blocks(table, num_elements)
        return SliceTable(num_elements, sizes, np.ascontiguousarray(table), offsets, members)

    @staticmethod
    def identity(num_elements: int) -> SliceTable:
        """The table of one destination that is the source."""
        runs = [Run(0, num_elements, 0, 0)] if num_elements else []
        return SliceTable.build(num_elements, [num_elements], runs)

    @property
    def is_complete(self) -> bool:
        """Whether every source element lands somewhere."""
        covered = np.zeros(self.num_elements, np.bool_)
        for row in self.runs:
            covered[_grid(row[0], row[1], row[2], row[3], 1).reshape(-1)] = True
        return bool(covered.all())

    def check_destinations(self, destinations: Sequence[torch.Tensor]) -> None:
        """Refuses tensors that are not contiguous or not of the table's sizes.

        Raises:
            ShapeError: names the tensor.
        """
        if len(destinations) != self.destination_elements.size:
            raise ShapeError(
                f"slice table: {len(destinations)} destinations; the table has {self.destination_elements.size}"
            )
        for index, (tensor, size) in enumerate(
            zip(destinations, self.destination_elements.tolist(), strict=True)
        ):
            if tensor.numel() != size or not tensor.is_contiguous():
                raise ShapeError(
                    f"slice table: destination {index} has {tensor.numel()} elements, strides {tensor.stride()}; "
                    f"expected {size} contiguous elements"
                )


def destination_indices(
    run: NDArray[np.int64], source_indices: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which of the source indices a run (a row of SliceTable.runs) covers, and where those land."""
    start, rows, length, source_stride, _, offset, row_stride, column_stride = run.tolist()
    relative = source_indices - start
    row, column = np.divmod(relative, source_stride)
    inside = (relative >= 0) & (row < rows) & (column < length)
    return inside, offset + row[inside] * row_stride + column[inside] * column_stride


def _resolve(run: Run) -> tuple[int, ...]:
    resolved = dataclasses.replace(
        run,
        source_stride=run.source_stride or run.row_length,
        row_stride=run.row_stride or run.row_length * run.column_stride,
    )
    return tuple(getattr(resolved, name) for name in FIELDS)


def _check_bounds(table: NDArray[np.int64], num_elements: int, sizes: NDArray[np.int64]) -> None:
    for row in table.tolist():
        start, rows, length, source_stride, destination, offset, row_stride, column_stride = row
        shown = ", ".join(f"{name}={value}" for name, value in zip(FIELDS, row, strict=True))
        if rows < 1 or length < 1 or row_stride < 1 or column_stride < 1 or source_stride < length:
            raise ShapeError(
                f"slice table: a run needs positive sizes and strides, source_stride >= row_length: {shown}"
            )
        if start < 0 or start + (rows - 1) * source_stride + length > num_elements:
            raise ShapeError(f"slice table: a run leaves the source of {num_elements} elements: {shown}")
        if not 0 <= destination < sizes.size:
            raise ShapeError(
                f"slice table: a run names a destination that is not one of {sizes.size}: {shown}"
            )
        last = offset + (rows - 1) * row_stride + (length - 1) * column_stride
        if offset < 0 or last >= sizes[destination]:
            raise ShapeError(
                f"slice table: a run leaves its destination of {int(sizes[destination])} elements: {shown}"
            )
        if (
            row_stride < length * column_stride
            and column_stride < rows * row_stride
            and rows > 1
            and length > 1
        ):
            raise ShapeError(f"slice table: a run writes an element of its destination twice: {shown}")


def _check_disjoint(table: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Two runs that write the same element would race."""
    first = table[:, 5]
    last = first + (table[:, 1] - 1) * table[:, 6] + (table[:, 2] - 1) * table[:, 7]
    for destination in range(sizes.size):
        chosen = np.flatnonzero(table[:, 4] == destination)
        chosen = chosen[np.argsort(first[chosen], kind="stable")]
        reach = np.maximum.accumulate(last[chosen])
        if not (first[chosen][1:] <= reach[:-1]).any():
            continue
        written = np.zeros(int(sizes[destination]), np.bool_)  # interleaved rectangles: look at every element
        for index in chosen:
            _, rows, length, _, _, offset, row_stride, column_stride = table[index].tolist()
            cells = np.lib.stride_tricks.as_strided(
                written[offset:], (rows, length), (row_stride, column_stride)
            )
            if cells.any():
                raise ShapeError(f"slice table: two runs write the same element of destination {destination}")
            cells[...] = True


def _grid(start: int, rows: int, length: int, row_stride: int, column_stride: int) -> NDArray[np.int64]:
    return (
        start
        + np.arange(rows, dtype=np.int64)[:, None] * row_stride
        + np.arange(length, dtype=np.int64)[None, :] * column_stride
    )


def _index_blocks(table: NDArray[np.int64], num_elements: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """CSR of the runs whose source range meets each block, in order of the runs."""
    num_blocks = count_blocks(num_elements)
    low = table[:, 0] // BLOCK_ELEMENTS
    high = (table[:, 0] + (table[:, 1] - 1) * table[:, 3] + table[:, 2] - 1) // BLOCK_ELEMENTS
    counts = high - low + 1
    run_of = np.repeat(np.arange(table.shape[0], dtype=np.int64), counts)
    within = np.arange(run_of.size, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    block_of = low[run_of] + within
    order = np.argsort(block_of, kind="stable")
    offsets = np.zeros(num_blocks + 1, np.int64)
    np.cumsum(np.bincount(block_of, minlength=num_blocks), out=offsets[1:])
    return offsets, run_of[order]
