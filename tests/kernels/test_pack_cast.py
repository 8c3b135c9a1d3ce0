"""pack_cast: bit-exact in every format, on every instruction set, at every width, and within its bounds.

The oracles are Python integers and torch's casts for "cast" (through weight_delta's reference, tested there), torch's
own float8_e4m3fn for codes, and exact powers of two for the scales.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headway_kernels import native
from headway_kernels.delta_reference import bits_of, cast_bits
from headway_kernels.errors import BackendUnavailable, ShapeError, UnsupportedOption
from headway_kernels.pack_cast import PackTable, Part, scale_shape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = ("fp8_block", "fp8_mx")
# One, below and beyond a vector, a microscaled group, a block, a stretch of 65,536 columns; several bands of rows.
SHAPES = ((1, 1), (1, 65_537), (3, 31), (5, 32), (2, 33), (127, 127), (128, 128), (129, 257), (300, 70))
HARD = (
    0.0, -0.0, 2.0**-149, -(2.0**-149), 1e-40, -(2.0**-126), 2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 2.0**-6, 447.0, 448.0,
    463.9, 464.0, 465.0, -464.0, 1e4, 3e38, -3e38, 0.4375, 17.0, 18.0, 19.0,
)  # fmt: skip


@pytest.fixture(params=["reference", *native.instruction_sets()])
def backend(request: Any) -> Any:
    """The reference and, of the native back-end, each instruction set."""
    if request.param == "reference":
        yield "reference"
        return
    native.force_instruction_set(request.param)
    yield "cpu"
    native.force_instruction_set(None)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def any_bits(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random bit patterns: numbers of all sizes, subnormals, infinities, NaNs of all payloads."""
    words = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
    return torch.from_numpy(words if dtype == torch.float32 else words.astype(np.uint16)).view(dtype)


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Finite, over 40 powers of two, with zeros of both signs and some of HARD."""
    generator = torch.Generator().manual_seed(rows * 1009 + columns)
    exponent = torch.randint(-28, 12, (rows, columns), generator=generator)
    values = torch.randn(rows, columns, generator=generator) * 2.0**exponent
    chosen = torch.rand(rows, columns, generator=generator)
    hard = torch.tensor(HARD)[torch.randint(0, len(HARD), (rows, columns), generator=generator)]
    values = torch.where((chosen < 0.1) & (hard.abs() < 1e4), hard, values)
    return values.to(dtype)


def quantise(source: Tensor, layout: Any, backend: Any) -> tuple[Tensor, Tensor]:
    """Codes and scales of one source, each in memory whose surroundings must stay as they are."""
    rows, columns = source.shape
    room = torch.full((rows + 2, columns + 3), 0x55, dtype=torch.uint8)
    target = room[1:-1, 1 : 1 + columns]
    shape, dtype = scale_shape(source, layout), torch.float32 if layout == "fp8_block" else torch.uint8
    edges = torch.full((shape[0] * shape[1] + 2,), 77, dtype=dtype)
    scales = edges[1:-1].view(shape)
    PackTable([Part(source, target, layout, scales)], backend=backend).run()
    codes = target.clone()
    target.fill_(0x55)
    assert (room == 0x55).all()
    assert edges[0] == edges[-1] == 77
    return codes, scales


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_a_cast_is_weight_deltas_cast_bit_for_bit(
    backend: Any, source: torch.dtype, target: torch.dtype
) -> None:
    """All 65,536 patterns of a half type, as many random ones of fp32: copies keep NaN payloads and -0.0."""
    values = any_bits(65_536, source, 1)
    if source != torch.float32:
        values = torch.arange(65_536).to(torch.int16).view(source)
    out = torch.empty(65_536, dtype=target)
    PackTable([Part(values, out)], backend=backend).run()
    expected = cast_bits(bits_of(values), source, target)
    np.testing.assert_array_equal(bits_of(out), expected)
    plain = ~values.isnan()
    assert same_bits(out[plain], values.to(target)[plain])


@pytest.mark.parametrize("shape", SHAPES)
def test_strided_parts_move_at_every_width_and_nothing_beside_them(
    backend: Any, shape: tuple[int, int]
) -> None:
    rows, columns = shape
    for source_dtype, target_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
        whole = any_bits(rows * (columns + 5), source_dtype, columns).view(rows, columns + 5)
        source = whole[:, 2 : 2 + columns]
        bucket = torch.full((rows * (columns + 1) + 2,), 7.0, dtype=target_dtype)
        target = bucket[1:-1].view(rows, columns + 1)[:, :columns]
        expected = cast_bits(bits_of(source.contiguous()), source_dtype, target_dtype)
        PackTable([Part(source, target)], backend=backend).run()
        np.testing.assert_array_equal(bits_of(target.contiguous()), expected)
        target.fill_(7.0)
        assert (bucket == 7.0).all()


@pytest.mark.parametrize("layout", FP8)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_instruction_set_writes_the_references_codes_and_scales(layout: Any, shape: Any) -> None:
    for dtype in DTYPES:
        source = numbers(*shape, dtype)
        codes, scales = quantise(source, layout, "reference")
        for name in native.instruction_sets():
            native.force_instruction_set(name)
            try:
                got, got_scales = quantise(source, layout, "cpu")
            finally:
                native.force_instruction_set(None)
            assert torch.equal(got, codes)
            assert same_bits(got_scales, scales)


def test_codes_are_torchs_for_every_value_in_range(backend: Any) -> None:
    """Every fp16 value up to 448 under a scale of 1: all codes and every tie between them."""
    values = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = values[values.isfinite() & (values.abs() <= 448)].float()
    rows = torch.full((len(values) // 31 + 1, 32), 256.0)  # 256 makes the exponent 0 and the scale 1
    rows[:, :31] = torch.nn.functional.pad(values, (0, rows[:, :31].numel() - len(values))).view(-1, 31)
    codes, scales = quantise(rows, "fp8_mx", backend)
    assert (scales == 127).all()
    assert torch.equal(codes, bits(rows.to(torch.float8_e4m3fn)))
    assert codes.unique().numel() == 254  # all but the two NaNs


@pytest.mark.parametrize("shape", [(1, 1), (3, 1000), (130, 300)])
def test_block_scales_are_the_largest_value_over_448(backend: Any, shape: tuple[int, int]) -> None:
    source = numbers(*shape)
    codes, scales = quantise(source, "fp8_block", backend)
    for down, right in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
        span = (slice(128 * down, 128 * down + 128), slice(128 * right, 128 * right + 128))
        most = source[span].abs().max()
        assert scales[down, right] == (most / 448 if most > 0 else 1)
        expected = (source[span] / scales[down, right]).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(codes[span], bits(expected))


@pytest.mark.parametrize("shape", [(1, 1), (70, 96), (2, 1001)])
def test_microscales_are_powers_of_two_below_the_largest_value(backend: Any, shape: tuple[int, int]) -> None:
    source = numbers(*shape)
    codes, scales = quantise(source, "fp8_mx", backend)
    for right in range(scales.shape[1]):
        span = (slice(None), slice(32 * right, 32 * right + 32))
        for row, most in enumerate(source[span].abs().amax(1).tolist()):
            exponent = max(-127, math.frexp(most)[1] - 1 - 8) if most >= 2.0**-126 else -127
            assert int(scales[row, right]) == exponent + 127
        exact = source[span].double() * 2.0 ** (127.0 - scales[:, right, None].double())
        expected = exact.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(codes[span], bits(expected))


@pytest.mark.parametrize("layout", FP8)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_block_and_in_no_other(backend: Any, layout: Any, bad: float) -> None:
    source = numbers(256, 256)
    clean, clean_scales = quantise(source, layout, backend)
    source[130, 70] = bad
    codes, scales = quantise(source, layout, backend)
    hit = torch.zeros(256, 256, dtype=torch.bool)
    scale_hit = torch.zeros(scales.shape, dtype=torch.bool)
    if layout == "fp8_block":
        hit[128:, :128], scale_hit[1, 0] = True, True
        assert math.isnan(float(scales[1, 0]))
    else:
        hit[130, 64:96], scale_hit[130, 2] = True, True
        assert int(scales[130, 2]) == 255
    assert (codes[hit] == 0x7F).all()
    assert torch.equal(codes[~hit], clean[~hit])
    assert same_bits(scales[~scale_hit], clean_scales[~scale_hit])


@pytest.mark.parametrize("layout", FP8)
def test_zeros_keep_their_sign_and_the_smallest_numbers_do_not_divide_by_zero(
    backend: Any, layout: Any
) -> None:
    source = torch.zeros(3, 40)
    source[1] = -0.0
    codes, scales = quantise(source, layout, backend)
    assert (codes[[0, 2]] == 0).all()
    assert (codes[1] == 0x80).all()
    assert (scales == (1 if layout == "fp8_block" else 0)).all()
    source[0, 0], source[1, 39] = 2.0**-149, -1e-42
    codes, scales = quantise(source, layout, backend)
    if layout == "fp8_block":
        assert (scales > 0).all()
    assert not ((codes & 0x7F) == 0x7F).any()


def test_many_parts_of_all_kinds_go_in_one_run_on_any_number_of_threads(backend: Any) -> None:
    parts: list[Part] = []
    for index, (shape, layout) in enumerate(itertools.product(SHAPES, ("cast", *FP8))):
        source = numbers(*shape, DTYPES[index % 3])
        if layout == "cast":
            parts.append(Part(source, torch.empty(shape, dtype=DTYPES[index % 2])))
            continue
        scales = torch.empty(
            scale_shape(source, layout), dtype=torch.float32 if layout == "fp8_block" else torch.uint8
        )
        parts.append(Part(source, torch.empty(shape, dtype=torch.float8_e4m3fn), layout, scales))
    parts.insert(4, Part(torch.zeros(0), torch.zeros(0)))
    parts.append(Part(torch.zeros(0, 5), torch.zeros(0, 5)))
    table = PackTable(parts, backend=backend)
    assert table.backend == backend
    tensors = [tensor for part in parts for tensor in (part.source, part.target, part.scales)]
    assert table.num_bytes == sum(t.numel() * t.element_size() for t in tensors if t is not None)
    threads, seen = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for part in parts:
                bits(part.target).fill_(1)
            table.run()
            outputs = (tensor for part in parts for tensor in (part.target, part.scales))
            seen.append([bits(t).clone() for t in outputs if t is not None])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *seen))
    for part in parts:
        if part.format == "cast":
            assert same_bits(part.target, part.source.to(part.target.dtype))


def test_an_empty_table_runs() -> None:
    PackTable([]).run()


X = torch.zeros(4, 64)
REFUSED: dict[str, tuple[Part, str]] = {
    "shapes": (Part(X, torch.zeros(4, 63)), "expected one shape"),
    "three dimensions": (Part(X[None], X[None].clone()), "expected one shape"),
    "source dtype": (Part(X.double(), X), r"source is torch\.float64"),
    "target dtype": (Part(X, X.int()), r"target is torch\.int32"),
    "stride": (Part(torch.zeros(64, 4).t(), X), "unit stride"),
    "codes": (Part(X, X.bfloat16(), "fp8_mx", torch.zeros(4, 2, dtype=torch.uint8)), "uint8"),
    "no scales": (Part(X, X.byte(), "fp8_mx"), r"scales are None; expected contiguous torch\.uint8 \[4, 2\]"),
    "scales' dtype": (Part(X, X.byte(), "fp8_mx", torch.zeros(4, 2)), r"torch\.uint8 \[4, 2\]"),
    "scales' shape": (Part(X, X.byte(), "fp8_block", torch.zeros(1, 2)), r"\[1, 1\]"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_fit_is_refused_by_name(fault: str) -> None:
    part, words = REFUSED[fault]
    with pytest.raises(ShapeError, match=words):
        PackTable([part])


def test_unknown_formats_and_back_ends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedOption, match="fp4"):
        PackTable([Part(X, X.clone(), "fp4")])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOption, match="writes no scales"):
        PackTable([Part(X, X.clone(), "cast", torch.zeros(1))])
    with pytest.raises(UnsupportedOption, match="backend 'triton'"):
        PackTable([], backend="triton")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOption, match="meta"):
        PackTable([Part(X.to("meta"), X.to("meta"))])
    with pytest.raises(ShapeError, match="several devices"):
        PackTable([Part(X, X.to("meta"))])
    monkeypatch.setattr(native, "available", lambda: False)
    with pytest.raises(BackendUnavailable, match="backend 'cpu' is not available"):
        PackTable([Part(X, X.clone())], backend="cpu")
    assert PackTable([Part(X, X.clone())]).backend == "reference"
