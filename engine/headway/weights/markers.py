"""The slice table as an engine's own loader has it: markers go in under the published names, and show where they land.

Each element is marked with its own index in the flat buffer, in base-256 digits, one digit a pass: small integers
survive every dtype that weights come in, so the loader's casts, fusions, transpositions and shards lose nothing.
What comes out is either the table itself (derive_table), for an engine nobody wrote rules for, or the proof that a
rule set agrees with the loader (verify_table). Done once at start; the weights are garbage until the first push.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import WeightError
from headway.types import Manifest
from headway.weights.served import published_dtype, uncovered_tensors
from headway_kernels.weight_delta import Run, SliceTable

Load = Callable[[Iterator[tuple[str, Tensor]]], None]


def read_landings(manifest: Manifest, load: Load, destinations: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    """For each destination, the index in the flat buffer that each of its elements takes its value from.

    Args:
        load: the engine's loader: takes (published name, tensor) pairs, tied names included.
        destinations: the engine's tensors, which `load` writes.

    Raises:
        WeightError: an element takes its value from nowhere, or from arithmetic rather than a copy.
    """
    digits = max(1, -(-int(manifest.num_elements).bit_length() // 8))
    found = [np.zeros(tensor.numel(), np.int64) for tensor in destinations]
    for digit in range(digits):
        for tensor in destinations:
            tensor.detach().fill_(float("nan"))
        load(_markers(manifest, digit))
        for index, tensor in enumerate(destinations):
            values = tensor.detach().reshape(-1).to(torch.float64).numpy()
            if not ((values >= 0) & (values <= 255) & (values == np.floor(values))).all():
                raise WeightError(
                    f"the engine's loader leaves elements of tensor {index} {list(tensor.shape)} unwritten, or "
                    "computes them from several; such a target cannot be pushed in place"
                )
            found[index] += values.astype(np.int64) << (8 * digit)
    return found


def _markers(manifest: Manifest, digit: int) -> Iterator[tuple[str, Tensor]]:
    dtype = published_dtype(manifest)
    for spec in manifest.tensors:
        indices = torch.arange(spec.offset, spec.offset + spec.size, dtype=torch.int64)
        marked = (indices >> (8 * digit) & 0xFF).to(dtype).view(spec.shape)
        for name in (spec.name, *spec.aliases):
            yield name, marked.clone()


def derive_table(manifest: Manifest, load: Load, destinations: Sequence[Tensor]) -> SliceTable:
    """The table that has the effect of the engine's loader.

    Raises:
        WeightError: as read_landings; or a published tensor that lands nowhere, by name.
    """
    runs: list[Run] = []
    for index, sources in enumerate(read_landings(manifest, load, destinations)):
        runs += _find_runs(sources, index)
    table = SliceTable.build(manifest.num_elements, [tensor.numel() for tensor in destinations], runs)
    missing = uncovered_tensors(table, manifest)
    if missing:
        raise WeightError(
            f"the engine's loader ignores {', '.join(missing[:5])}; a push would leave them as they were"
        )
    return table


def verify_table(table: SliceTable, manifest: Manifest, load: Load, destinations: Sequence[Tensor]) -> None:
    """Compare a table with what the engine's loader does.

    Raises:
        WeightError: they differ; names the first tensor and element.
    """
    for index, sources in enumerate(read_landings(manifest, load, destinations)):
        expected = np.full(len(sources), -1, np.int64)
        for start, rows, length, stride, _, offset, row_stride, column_stride in table.runs[
            table.runs[:, 4] == index
        ].tolist():
            row, column = np.arange(rows)[:, None], np.arange(length)[None, :]
            expected[offset + row * row_stride + column * column_stride] = start + row * stride + column
        wrong = np.flatnonzero(expected != sources)
        if len(wrong):
            at = int(wrong[0])
            raise WeightError(
                f"the slice table sends {_name(manifest, int(expected[at]))} to element {at} of tensor {index}, the "
                f"engine's loader {_name(manifest, int(sources[at]))} ({len(wrong)} of {len(sources)} differ)"
            )


def _name(manifest: Manifest, position: int) -> str:
    for spec in manifest.tensors:
        if spec.offset <= position < spec.offset + spec.size:
            return f"{spec.name}[{position - spec.offset}]"
    return "nothing"


def _find_runs(sources: NDArray[np.int64], destination: int) -> list[Run]:
    """Cover a destination with few runs.

    In the order of the source, stretches whose source steps by 1 and whose destination steps by a constant are rows;
    equal rows at constant distances are one run.
    """
    if sources.size == 0:
        return []
    landing = np.argsort(sources, kind="stable").astype(np.int64)
    source = sources[landing]
    rows = _rows(source, landing)
    runs: list[Run] = []
    at = 0
    while at < len(rows):
        start, length, offset, column = rows[at]
        count = 1
        stride = row_stride = 0
        while at + count < len(rows):
            following = rows[at + count]
            steps = following[0] - rows[at + count - 1][0], following[2] - rows[at + count - 1][2]
            same = following[1] == length and following[3] == column
            if not same or steps[0] < length or steps[1] < 1 or (count > 1 and steps != (stride, row_stride)):
                break
            stride, row_stride = steps
            count += 1
        if count == 1:
            stride = row_stride = 0
        runs.append(
            Run(
                start, length, destination, offset, rows=count,
                source_stride=stride, row_stride=row_stride, column_stride=column,
            )
        )  # fmt: skip
        at += count
    return runs


def _rows(source: NDArray[np.int64], landing: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    """(source start, length, destination offset, destination step) of each maximal stretch."""
    rows: list[tuple[int, int, int, int]] = []
    steps = np.diff(landing)
    joined = (np.diff(source) == 1) & (steps > 0)
    at = 0
    size = len(source)
    # Where the step changes, a stretch ends; the element there may begin the next one, so ends are found greedily.
    changes = np.flatnonzero(~joined[:-1] | ~joined[1:] | (steps[:-1] != steps[1:])) + 1 if size > 2 else None
    while at < size:
        if at == size - 1 or not joined[at]:
            rows.append((int(source[at]), 1, int(landing[at]), 1))
            at += 1
            continue
        after = np.searchsorted(changes, at + 1) if changes is not None else 0
        end = int(changes[after]) if changes is not None and after < len(changes) else size - 1
        rows.append((int(source[at]), end - at + 1, int(landing[at]), int(steps[at])))
        at = end + 1
    return rows
