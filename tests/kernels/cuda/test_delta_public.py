"""weight_delta's public functions with backend="cuda": the same deltas and the same bits as the other back-ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from headway_kernels import weight_delta
from headway_kernels.errors import BackendUnavailable, ShapeError, UnsupportedOption
from headway_kernels.slice_table import Run, SliceTable

pytestmark = pytest.mark.cuda_emulated

SIZE = weight_delta.BLOCK_ELEMENTS + 1001


def random_bits(seed: int, size: int = SIZE) -> Tensor:
    words = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
    return torch.from_numpy(words.view(np.float32))


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.view(kind), b.view(kind))


def test_cast_diff_and_both_applies_agree_with_the_reference() -> None:
    master, start = random_bits(1), random_bits(2).bfloat16()
    start[1000:] = master.bfloat16()[1000:]
    ours, theirs, buffer = start.clone(), start.clone(), np.empty(2 * SIZE, np.uint8)
    pieces = list(master.split([1, 7000, SIZE - 7001]))
    delta = weight_delta.cast_and_diff(pieces, ours, payload=buffer, backend="cuda")
    expected = weight_delta.cast_and_diff(pieces, theirs, backend="reference")
    weight_delta.validate(delta)
    assert np.shares_memory(delta.payload, buffer)
    assert weight_delta.to_bytes(delta) == weight_delta.to_bytes(expected)
    assert same_bits(ours, theirs)
    again = weight_delta.diff(ours, start.clone(), backend="cuda")
    assert weight_delta.to_bytes(again) == weight_delta.to_bytes(
        weight_delta.diff(ours, start, backend="reference")
    )
    received = start.clone()
    weight_delta.apply_delta(delta, received.view(1, -1), backend="cuda")
    assert same_bits(received, ours)
    table = SliceTable.build(SIZE, [500, SIZE], [Run(0, 500, 0, 0), Run(500, SIZE - 500, 1, 3)])
    mine, other = ([torch.zeros(500), torch.zeros(SIZE)] for _ in range(2))
    weight_delta.apply_slices(delta, table, mine, cast=True, backend="cuda")
    weight_delta.apply_slices(delta, table, other, cast=True, backend="reference")
    assert all(same_bits(a, b) for a, b in zip(mine, other, strict=True))


def test_what_does_not_fit_is_refused_alike() -> None:
    master, half = random_bits(3, 8), random_bits(4, 8).bfloat16()
    with pytest.raises(ShapeError, match=r"master is torch\.bfloat16"):
        weight_delta.cast_and_diff(half, half.clone(), backend="cuda")
    with pytest.raises(ShapeError, match="payload is uint8"):
        weight_delta.cast_and_diff(master, half, payload=np.empty(3, np.uint8), backend="cuda")
    delta = weight_delta.cast_and_diff(master, half, backend="cuda")
    with pytest.raises(ShapeError, match="destination has 9 elements"):
        weight_delta.apply_delta(delta, torch.zeros(9).bfloat16(), backend="cuda")
    with pytest.raises(ShapeError, match=r"destination 0 is torch\.float32"):
        weight_delta.apply_slices(delta, SliceTable.identity(8), [master], backend="cuda")
    with pytest.raises(UnsupportedOption, match="'cuda' where tensors are given"):
        weight_delta.merge(delta, delta, backend="cuda")


def test_the_emulated_kernels_run_only_if_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BackendUnavailable("chosen")

    monkeypatch.setattr("headway_kernels.cuda.host_delta.encode_to_host", refuse)
    weight_delta.cast_and_diff(random_bits(5, 8), torch.zeros(8).bfloat16())
    with pytest.raises(BackendUnavailable, match="chosen"):
        weight_delta.cast_and_diff(random_bits(5, 8), torch.zeros(8).bfloat16(), backend="cuda")
