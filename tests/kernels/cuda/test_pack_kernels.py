"""pack_cast on the CUDA kernel: casts bit for bit, fp8 codes and scales against torch's own fp8."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sparse import sparse_memory
from torch import Tensor

from headway_kernels.cuda.library import PackPart, library
from headway_kernels.delta_reference import bits_of, cast_bits
from headway_kernels.errors import ShapeError, UnsupportedOption
from headway_kernels.pack_cast import PackTable, Part, scale_shape

pytestmark = pytest.mark.cuda_emulated

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def random_bits(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    words = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
    return torch.from_numpy(words if dtype == torch.float32 else words.astype(np.uint16)).view(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_a_cast_equals_the_reference_bit_for_bit(source: torch.dtype, target: torch.dtype) -> None:
    """All 65,536 patterns of a half type, or as many random ones of fp32: NaNs, subnormals, overflow."""
    values = random_bits(65_536, source, 1)
    if source != torch.float32:
        values = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(source)
    out = torch.empty(65_536, dtype=target)
    PackTable([Part(values, out)], backend="cuda").run()
    expected = cast_bits(bits_of(values), source, target)
    np.testing.assert_array_equal(bits_of(out), expected)


def test_casts_to_half_types_round_as_torch_rounds() -> None:
    """A second oracle, around every tie: fp32 values half way between neighbours of a half type, and one bit off."""
    for target in (torch.bfloat16, torch.float16):
        codes = torch.arange(0, 0x7C00 if target == torch.float16 else 0x7F80, 7, dtype=torch.int16)
        low, high = codes.view(target).double(), (codes + 1).view(target).double()
        middle = ((low + high) / 2).float()
        middle = middle[middle.isfinite()]
        values = torch.cat([middle, torch.nextafter(middle, torch.tensor(0.0)), -middle])
        values = torch.cat([values, torch.nextafter(middle, torch.tensor(torch.inf))])
        out = torch.empty(values.shape, dtype=target)
        PackTable([Part(values, out)], backend="cuda").run()
        assert torch.equal(bits(out), bits(values.to(target)))


def test_many_parts_of_all_kinds_move_in_one_launch() -> None:
    """Gather from strided sources, scatter into a bucket at any alignment; nothing else is written."""
    rng = np.random.default_rng(4)
    bucket = torch.full((60_000,), 7.0, dtype=torch.bfloat16)
    written = torch.zeros(60_000, dtype=torch.bool)
    parts, expected, at = [], [], 3
    for rows, columns, extra in [
        (1, 1, 0),
        (3, 7, 2),
        (200, 5, 0),
        (5, 3_000, 8),
        (130, 64, 1),
        (1, 17_000, 0),
    ]:
        whole = torch.from_numpy(rng.standard_normal((rows, columns + extra)).astype(np.float32))
        source = whole[:, extra:]
        target = bucket[at : at + rows * columns].view(rows, columns)
        written[at : at + rows * columns] = True
        parts.append(Part(source, target))
        expected.append(source.bfloat16())
        at += rows * columns + 5
    wide = torch.zeros(40, 100)
    parts.append(Part(bucket.new_ones(40, 30), wide[:, 10:40]))
    parts.append(Part(torch.zeros(0), torch.zeros(0)))
    PackTable(parts, backend="cuda").run()
    for part, value in zip(parts, expected, strict=False):
        assert torch.equal(bits(part.target), bits(value))
    assert (bucket[~written] == 7).all()
    assert wide.sum() == 40 * 30
    assert (wide[:, 10:40] == 1).all()


def test_fp8_codes_equal_torch_for_every_value_in_range() -> None:
    """Unit scales: every fp16 value up to 448, which holds every tie of e4m3."""
    values = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = values[values.isfinite() & (values.abs() <= 448)].float()
    rows = torch.full(
        (len(values) // 31 + 1, 32), 256.0
    )  # the last of a row makes its exponent 8, and the scale 1
    rows[:, :31] = torch.nn.functional.pad(values, (0, rows[:, :31].numel() - len(values))).view(-1, 31)
    target, scales = (
        torch.empty(rows.shape, dtype=torch.float8_e4m3fn),
        torch.empty(len(rows), 1, dtype=torch.uint8),
    )
    PackTable([Part(rows, target, "fp8_mx", scales)], backend="cuda").run()
    assert (scales == 127).all()
    assert torch.equal(bits(target), bits(rows.to(torch.float8_e4m3fn)))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (130, 300), (256, 128), (3, 1000)])
def test_fp8_blocks_divide_by_their_scale(source: torch.dtype, rows: int, columns: int) -> None:
    values = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 3).to(source)
    values[0, 0] = 0
    target = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.full(scale_shape(values, "fp8_block"), -1.0)
    PackTable([Part(values, target, "fp8_block", scales)], backend="cuda").run()
    for down, row in enumerate(range(0, rows, 128)):
        for right, column in enumerate(range(0, columns, 128)):
            block = values[row : row + 128, column : column + 128].float()
            most = block.abs().max()
            scale = most / 448 if most > 0 else torch.tensor(1.0)
            assert scales[down, right] == scale
            codes = target[row : row + 128, column : column + 128]
            assert torch.equal(codes, bits((block / scale).to(torch.float8_e4m3fn)))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 40), (70, 96), (2, 5000)])
def test_microscales_are_powers_of_two_that_saturate(source: torch.dtype, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    spread = 2.0 ** torch.randint(-20, 12, (rows, columns), generator=generator)
    values = (torch.randn(rows, columns, generator=generator) * spread).to(source)
    values[0, :] = 0
    target = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(scale_shape(values, "fp8_mx"), dtype=torch.uint8)
    PackTable([Part(values, target, "fp8_mx", scales)], backend="cuda").run()
    for right, column in enumerate(range(0, columns, 32)):
        block = values[:, column : column + 32].double()
        most = block.abs().amax(1)
        exponent = torch.where(most > 0, torch.log2(most).floor() - 8, -127.0).clamp(min=-127)
        assert torch.equal(scales[:, right].double() - 127, exponent)
        scaled = (block / 2.0 ** exponent[:, None]).clamp(-448, 448)
        codes = target[:, column : column + 32]
        assert torch.equal(bits(codes), bits(scaled.float().to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_shows_in_the_scale(bad: float) -> None:
    values = torch.ones(2, 64)
    values[1, 40] = bad
    codes, scales = torch.empty(2, 64, dtype=torch.uint8), torch.empty(2, 2, dtype=torch.uint8)
    PackTable([Part(values, codes, "fp8_mx", scales)], backend="cuda").run()
    assert scales.tolist() == [[119, 119], [119, 255]]
    assert codes.view(torch.float8_e4m3fn)[1, 32:].float().isnan().all()
    block = torch.empty(1, 1)
    PackTable([Part(values, codes, "fp8_block", block)], backend="cuda").run()
    assert block.isnan().all()


def test_zeros_and_tiny_values_have_usable_scales() -> None:
    codes, scale = torch.empty(1, 8, dtype=torch.uint8), torch.empty(1, 1)
    PackTable([Part(torch.zeros(1, 8), codes, "fp8_block", scale)], backend="cuda").run()
    assert (scale.item(), codes.any().item()) == (1.0, False)
    PackTable([Part(torch.full((1, 8), 1e-45), codes, "fp8_block", scale)], backend="cuda").run()
    assert (scale.item(), codes.any().item()) == (1.0, False)


def test_what_does_not_fit_is_refused() -> None:
    flat, codes = torch.zeros(4, 64), torch.zeros(4, 64, dtype=torch.uint8)
    with pytest.raises(UnsupportedOption, match="choose from cast, fp8_block, fp8_mx"):
        PackTable([Part(flat, flat, "fp4")], backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOption, match="writes no scales"):
        PackTable([Part(flat, flat, "cast", flat)], backend="cuda")
    with pytest.raises(ShapeError, match="expected one shape"):
        PackTable([Part(flat, flat[:2])], backend="cuda")
    with pytest.raises(ShapeError, match="scales are None"):
        PackTable([Part(flat, codes, "fp8_block")], backend="cuda")
    with pytest.raises(ShapeError, match=r"expected .* \[4, 2\]"):
        PackTable([Part(flat, codes, "fp8_mx", torch.zeros(4, 3, dtype=torch.uint8))], backend="cuda")
    with pytest.raises(ShapeError, match=r"target is torch\.uint8"):
        PackTable([Part(flat, codes)], backend="cuda")


def test_strides_beyond_32_bits() -> None:
    """Rows that lie 2^31 + 8 elements apart, in memory of which only the touched pages exist."""
    stride, rows, columns = 2**31 + 8, 3, 40
    room = sparse_memory(2 * rows * stride)
    whole = torch.frombuffer(room, dtype=torch.bfloat16, count=rows * stride)
    far = torch.as_strided(whole, (rows, columns), (stride, 1))
    values = torch.randn(rows, columns)
    PackTable([Part(values, far)], backend="cuda").run()
    assert torch.equal(far, values.bfloat16())
    back = torch.empty(rows, columns, dtype=torch.bfloat16)
    PackTable([Part(far, back)], backend="cuda").run()
    assert torch.equal(back, values.bfloat16())


def test_a_part_of_more_than_2_to_31_groups_finds_its_rows() -> None:
    """The last tile of a matrix of 2^33 elements a row: only the elements behind 2^34 are written."""
    columns, rows = 2**33, 2
    lib, part = library(), PackPart(rows=rows, columns=columns, source_stride=columns, target_stride=columns)
    num_bytes = 2 * rows * columns
    source, target = sparse_memory(num_bytes), sparse_memory(num_bytes)
    start = rows * columns - 16_384
    new = torch.frombuffer(source, dtype=torch.bfloat16, count=16_384, offset=2 * start)
    out = torch.frombuffer(target, dtype=torch.bfloat16, count=16_384, offset=2 * start)
    new[:] = torch.randn(16_384).bfloat16()
    part.source, part.target = new.data_ptr() - 2 * start, out.data_ptr() - 2 * start
    tiles = lib.pack_tiles(part)
    assert tiles == rows * columns // 16_384
    table = torch.frombuffer(bytearray(bytes(part)), dtype=torch.uint8)
    lib.call("pack_cast", torch.device("cpu"), table, torch.tensor([0, tiles]), 1, tiles - 1, 1)
    assert torch.equal(out, new)
