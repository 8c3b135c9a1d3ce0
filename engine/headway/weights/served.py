"""The weights that an engine serves, as the receiving side of a push sees them: written, read back, or swapped.

Two shapes: one flat fp32 buffer in the manifest's order (the embedded engine), and tensors that a SliceTable maps
to (engines that fuse, shard or transpose). Called by the stager: `write` and `swap` between two decode steps, on
the engine's thread; `read` beside generation, on the stager's, while nobody writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import WeightError
from headway.types import Manifest, PolicyVersion
from headway.weights.digest import byte_view
from headway_kernels.slice_table import destination_indices
from headway_kernels.weight_delta import (
    BLOCK_ELEMENTS,
    DENSE,
    Delta,
    SliceTable,
    apply_delta,
    apply_slices,
)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def published_dtype(manifest: Manifest) -> torch.dtype:
    """Of a manifest's published weights."""
    return TORCH_DTYPES[manifest.dtype]


class FlatEngine(Protocol):
    """An engine whose weights are one flat buffer."""

    @property
    def flat(self) -> Tensor:
        """fp32 [num_elements], in the manifest's order, as served."""
        ...

    def apply(self, copy: Callable[[Tensor], PolicyVersion]) -> None:
        """Let `copy` write the flat weights, and put the version it returns in force."""
        ...

    def swap(self, flat: Tensor, version: PolicyVersion) -> None:
        """Serve from `flat` from now on."""
        ...


class Served(Protocol):
    """Weights that are being served."""

    @property
    def swaps(self) -> bool:
        """Whether a published buffer can be served as it is."""
        ...

    @property
    def prepares(self) -> bool:
        """Whether `prepare` writes a push beside generation, and `write` only puts it in force."""
        ...

    def prepare(self, deltas: Sequence[Delta], *, more: bool) -> None:
        """Write the deltas' elements where they are not served yet; `more`: to what was prepared before."""
        ...

    def settle(self, stretches: Sequence[tuple[int, int]]) -> None:
        """After a write of what was prepared, whose elements were (start, end): make ready for the next."""
        ...

    def write(self, version: PolicyVersion, deltas: Sequence[Delta]) -> None:
        """Write the deltas' elements, in order, and put `version` in force. Calling it again writes the same."""
        ...

    def swap(self, version: PolicyVersion, state: Tensor) -> None:
        """Serve from `state`, a published buffer that nobody writes, and put `version` in force."""
        ...

    def read(self, start: int, end: int) -> memoryview:
        """Published bytes of elements start to end, whole blocks, as they are in force now.

        Raises:
            WeightError: what is served is no published value.
        """
        ...


class InPlace:
    """Served weights that a push is written into, nowhere else first."""

    prepares = False

    def prepare(self, deltas: Sequence[Delta], *, more: bool) -> None:
        """Nothing: `write` does it all."""

    def settle(self, stretches: Sequence[tuple[int, int]]) -> None:
        """Nothing."""


class FlatServed(InPlace):
    """Served over a FlatEngine.

    Args:
        engine: computes in fp32; manifest: of the weights it serves.
    """

    def __init__(self, engine: FlatEngine, manifest: Manifest) -> None:
        self._engine = engine
        self._dtype = published_dtype(manifest)

    @property
    def swaps(self) -> bool:
        """A bf16 buffer must be widened for an engine that computes in fp32: only equal dtypes are swapped."""
        return self._dtype == self._engine.flat.dtype

    def write(self, version: PolicyVersion, deltas: Sequence[Delta]) -> None:
        """See Served."""

        def copy(flat: Tensor) -> PolicyVersion:
            for delta in deltas:
                write_flat(delta, flat)
            return version

        self._engine.apply(copy)

    def swap(self, version: PolicyVersion, state: Tensor) -> None:
        """See Served."""
        self._engine.swap(state, version)

    def read(self, start: int, end: int) -> memoryview:
        """See Served."""
        return byte_view(_narrow(self._engine.flat[start:end], self._dtype, start))


def _narrow(part: Tensor, dtype: torch.dtype, start: int) -> Tensor:
    """Served values as published ones. A bf16 value widened to fp32 has 16 zero bits at its end, NaNs too."""
    if part.dtype == dtype:
        return part.detach()
    words = part.detach().view(torch.int32)
    if part.numel() and int((words & 0xFFFF).max()):  # max is a vector loop, any is not
        raise WeightError(
            f"block {start // BLOCK_ELEMENTS} of the served weights, or one after it, holds values that are not {dtype}"
        )
    return (words >> 16).to(torch.int16)


def is_dense(delta: Delta) -> bool:
    """Whether a delta is a whole state."""
    return bool((delta.formats == DENSE).all())


def write_flat(delta: Delta, flat: Tensor) -> None:
    """Write a delta's elements into a flat buffer of its dtype or fp32."""
    if is_dense(delta):
        # torch's widening copy is one vector loop over all of it; values are in order, so nothing is looked up.
        flat.copy_(torch.from_numpy(delta.payload).view(delta.dtype))
    elif delta.dtype == flat.dtype:
        apply_delta(delta, flat)
    else:
        apply_slices(delta, _identity(delta.num_elements), [flat], cast=True)


_identities: dict[int, SliceTable] = {}


def _identity(num_elements: int) -> SliceTable:
    if num_elements not in _identities:
        _identities[num_elements] = SliceTable.identity(num_elements)
    return _identities[num_elements]


class SlicedServed(InPlace):
    """Served over tensors of any layout.

    Args:
        table: of headway.weights.slices, where every tensor of the manifest lands somewhere, so that what is in
            force can be read back whole. Give all ranks' tensors where a model is sharded inside one process.
        tensors: the destinations, of the published dtype or fp32, contiguous; written in place.
        manifest: of the published weights.
        put: called with the version after the last element is written.

    Raises:
        WeightError: a tensor of the manifest, or a part of it, lands nowhere.
    """

    def __init__(
        self,
        table: SliceTable,
        tensors: Sequence[Tensor],
        manifest: Manifest,
        put: Callable[[PolicyVersion], None],
    ) -> None:
        self._table, self._tensors, self._put = table, list(tensors), put
        self._dtype = published_dtype(manifest)
        uncovered = uncovered_tensors(table, manifest)
        if uncovered:
            raise WeightError(
                f"the slice table leaves parts of {', '.join(uncovered[:5])} unserved; what is in force could not "
                "be proved: give the tensors of every rank, or map what is left out"
            )

    @property
    def swaps(self) -> bool:
        """Never: the layouts differ."""
        return False

    def write(self, version: PolicyVersion, deltas: Sequence[Delta]) -> None:
        """See Served."""
        self._apply(deltas)
        self._put(version)

    def _apply(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            apply_slices(delta, self._table, self._tensors, cast=True)

    def swap(self, version: PolicyVersion, state: Tensor) -> None:
        """Refused."""
        raise WeightError("weights of another layout than the published one cannot be swapped")

    def read(self, start: int, end: int) -> memoryview:
        """See Served. Tied copies must agree; alignment gaps, which land nowhere, are zero as published."""
        out = torch.zeros(end - start, dtype=self._dtype)
        for block_start in range(start, end, BLOCK_ELEMENTS):
            block_end = min(end, block_start + BLOCK_ELEMENTS)
            self._read_block(block_start, block_end, out[block_start - start : block_end - start])
        return byte_view(out)

    def _read_block(self, start: int, end: int, out: Tensor) -> None:
        bits = out.view(torch.int16 if self._dtype.itemsize == 2 else torch.int32)
        seen = torch.zeros(end - start, dtype=torch.bool)
        table, block = self._table, start // BLOCK_ELEMENTS
        for row in table.block_runs[table.block_offsets[block] : table.block_offsets[block + 1]]:
            run = table.runs[row]
            first, last = covered_stretch(run, start, end)
            served = self._tensors[int(run[4])].detach().view(-1)
            into = slice(first - start, last - start)
            at = straight_landing(run, first)
            if at is None:
                found, landing = destination_indices(run, np.arange(first, last, dtype=np.int64))
                inside, taken = torch.from_numpy(found), served[torch.from_numpy(landing)]
            else:
                inside, taken = slice(None), served[at : at + last - first]
            values = _narrow(taken.cpu(), self._dtype, start).view(bits.dtype)
            again = seen[into][inside]
            if bool(again.any()) and not torch.equal(bits[into][inside][again], values[again]):
                raise WeightError(f"block {block}: tied copies of one tensor are not served alike")
            bits[into][inside] = values
            seen[into][inside] = True


def covered_stretch(run: NDArray[np.int64], start: int, end: int) -> tuple[int, int]:
    """The part of [start, end) outside of which a run (a row of SliceTable.runs) covers nothing."""
    first, rows, length, source_stride, *_ = run.tolist()
    return max(start, first), min(end, first + (rows - 1) * source_stride + length)


def straight_landing(run: NDArray[np.int64], first: int) -> int | None:
    """Where source element `first` lands, if all that follow it in the run land behind it; None if they do not."""
    start, rows, length, source_stride, _, offset, row_stride, column_stride = run.tolist()
    straight = column_stride == 1 and (rows == 1 or source_stride == row_stride == length)
    return offset + first - start if straight else None


def uncovered_tensors(table: SliceTable, manifest: Manifest) -> list[str]:
    """Names of the manifest's tensors of which some element lands nowhere."""
    counts = np.zeros(manifest.num_elements + 1, np.int32)
    for start, rows, length, source_stride, *_ in table.runs.tolist():
        firsts = start + np.arange(rows, dtype=np.int64) * source_stride
        np.add.at(counts, firsts, 1)
        np.add.at(counts, firsts + length, -1)
    covered = np.cumsum(counts[:-1]) > 0
    return [
        spec.name for spec in manifest.tensors if not covered[spec.offset : spec.offset + spec.size].all()
    ]
