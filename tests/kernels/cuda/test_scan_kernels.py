"""segment_scan on the CUDA kernel against the fp64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sparse import sparse_memory

from headway_kernels.cuda.library import library
from headway_kernels.errors import ShapeError, UnsupportedOption
from headway_kernels.segment_scan import SegmentScan, segment_scan

pytestmark = pytest.mark.cuda_emulated

# 0 and 1 token; a warp's chunk and its neighbours; a warp's four chunks; one tile of 512, and several.
LENGTHS = (0, 1, 31, 32, 33, 127, 129, 0, 511, 512, 513, 1500)
FACTORS = ("gamma", "lam", "rho_cap", "c_cap")
KINDS: dict[str, dict[str, Any]] = {
    "return": {"gamma": 0.97},
    "gae": {"gamma": 0.99, "lam": 0.95},
    "vtrace": {"gamma": 0.98, "lam": 0.9, "rho_cap": 1.2, "c_cap": 1.05},
}


def inputs(lengths: tuple[int, ...], seed: int, kind: str, active: float) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    count = sum(lengths)

    def normal(size: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(size).astype(np.float32))

    out: dict[str, Any] = {
        "kind": kind,
        "rewards": normal(count),
        "segments": torch.from_numpy(np.cumsum([0, *lengths])),
        "values": normal(count),
        "log_ratio": normal(count) * 0.3 if kind == "vtrace" else None,
        "mask": torch.from_numpy(rng.random(count) < active),
        "bootstrap": normal(len(lengths)),
    }
    for name in ("rewards", "values", "log_ratio"):
        if out[name] is not None:  # what is passed over may hold anything
            out[name][~out["mask"]] = float("nan")
    return out


def compare(arguments: dict[str, Any], got: SegmentScan) -> None:
    wide = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    expected = segment_scan(**wide, backend="reference")
    for mine, exact in zip(got, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), exact, rtol=2e-6, atol=1e-5)
        if arguments["mask"] is not None:
            assert not mine[~arguments["mask"]].any()


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("active", [1.0, 0.6, 0.02])
def test_every_kind_equals_fp64(kind: str, active: float) -> None:
    arguments = inputs(LENGTHS, 3, kind, active) | KINDS[kind]
    compare(arguments, segment_scan(**arguments, backend="cuda"))


@pytest.mark.parametrize("kind", KINDS)
def test_optional_inputs_may_be_absent(kind: str) -> None:
    arguments = inputs((5, 700), 4, kind, 1.0) | {"mask": None, "bootstrap": None}
    if kind == "return":
        arguments["values"] = None
    compare(arguments, segment_scan(**arguments, backend="cuda"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_alone_has_the_same_bits_as_among_others(kind: str) -> None:
    lengths = (700, 40, 1030)
    whole = inputs(lengths, 5, kind, 0.8) | KINDS[kind]
    packed = segment_scan(**whole, backend="cuda")
    for index, (low, high) in enumerate(zip([0, 700, 740], [700, 740, 1770], strict=True)):
        alone = dict(
            whole, segments=torch.tensor([0, high - low]), bootstrap=whole["bootstrap"][index : index + 1]
        )
        for name in ("rewards", "values", "log_ratio", "mask"):
            alone[name] = None if whole[name] is None else whole[name][low:high].clone()
        for mine, other in zip(segment_scan(**alone, backend="cuda"), packed, strict=True):
            assert torch.equal(mine.view(torch.int32), other[low:high].view(torch.int32))


def test_long_undiscounted_sums_stay_exact_to_fp32() -> None:
    arguments = inputs((6_000,), 6, "gae", 1.0) | {"gamma": 1.0, "lam": 1.0}
    compare(arguments, segment_scan(**arguments, backend="cuda"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("kind", "name"), [("return", "rewards"), ("gae", "values"), ("vtrace", "log_ratio")]
)
def test_a_value_that_is_not_finite_shows_in_all_outputs_before_it(kind: str, name: str, bad: float) -> None:
    arguments = inputs((600, 50), 7, kind, 1.0) | KINDS[kind] | {"gamma": 0.0}
    arguments[name][520] = bad
    got = segment_scan(**arguments, backend="cuda")
    assert got.target[:520].isnan().all()
    assert got.advantage[:520].isnan().all() if kind != "vtrace" else got.advantage[:519].isnan().all()
    assert got.target[521:].isfinite().all()


def test_a_huge_ratio_is_bounded_as_the_reference_bounds_it() -> None:
    """A1: exp of the log-ratio would overflow."""
    arguments = inputs((40,), 8, "vtrace", 1.0) | KINDS["vtrace"]
    arguments["log_ratio"][::3] = 89.0
    arguments["log_ratio"][1::3] = -200.0
    compare(arguments, segment_scan(**arguments, backend="cuda"))


def test_narrow_inputs_are_widened_and_wide_ones_refused() -> None:
    arguments = inputs((300,), 9, "gae", 1.0) | KINDS["gae"]
    narrow = dict(arguments, rewards=arguments["rewards"].bfloat16(), values=arguments["values"].half())
    compare(narrow, segment_scan(**narrow, backend="cuda"))
    with pytest.raises(UnsupportedOption, match=r"rewards is torch\.float64"):
        segment_scan(**dict(arguments, rewards=arguments["rewards"].double()), backend="cuda")


def test_offsets_that_do_not_cover_the_tokens_are_refused() -> None:
    with pytest.raises(ShapeError, match="must rise from 0"):
        segment_scan("return", torch.zeros(5), torch.tensor([0, 4]), backend="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_beyond_32_bits(kind: str) -> None:
    """A segment behind token 2^32 of rows of which only the pages of this segment exist."""
    start, count = 2**32 + 11, 700
    arguments = inputs((count,), 40, kind, 0.8)
    expected = segment_scan(**arguments, **KINDS[kind], backend="cuda")
    rooms = {
        name: None if arguments[name] is None else at_token(arguments[name], start)
        for name in ("rewards", "values", "log_ratio", "mask")
    }
    outs = [at_token(torch.zeros(count), start) for _ in expected]
    bases = [
        None if each is None else each.data_ptr() - start * each.element_size() for each in rooms.values()
    ]
    factors = [
        {"gamma": 1.0, "lam": 1.0, "rho_cap": 1.0, "c_cap": 1.0, **KINDS[kind]}[name] for name in FACTORS
    ]
    library().call(
        "segment_scan", torch.device("cpu"), tuple(KINDS).index(kind), bases[0], torch.tensor([start, start + count]),
        *bases[1:], arguments["bootstrap"], 1, *factors, *(out.data_ptr() - 4 * start for out in outs),
    )  # fmt: skip
    for out, other in zip(outs, expected, strict=True):
        assert torch.equal(out, other)


def at_token(values: torch.Tensor, start: int) -> torch.Tensor:
    """A copy that lies `start` elements into memory of which no other page exists."""
    size = values.element_size()
    room = sparse_memory((start + values.numel()) * size)
    out = torch.frombuffer(room, dtype=values.dtype, count=values.numel(), offset=start * size)
    return out.copy_(values)
