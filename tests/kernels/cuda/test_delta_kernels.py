"""weight_delta on the CUDA kernels: bit for bit what delta_reference.py gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sparse import sparse_memory
from torch import Tensor

from headway_kernels import weight_delta as reference
from headway_kernels.cuda import weight_delta as cuda
from headway_kernels.cuda.library import library
from headway_kernels.delta_format import BLOCK_ELEMENTS, BlockFormat, Delta
from headway_kernels.errors import ShapeError
from headway_kernels.slice_table import Run, SliceTable

pytestmark = pytest.mark.cuda_emulated

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# One block that is cut short at an odd byte of marks, with a whole one before it.
SIZE = BLOCK_ELEMENTS + 30_011
# Signed zeros, subnormals, halves between neighbours, overflow, infinities, NaNs with payloads and without a quiet bit.
SPECIAL = (
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x33000000, 0x33000001, 0x387FE000, 0x3F808000, 0x3F818000,
    0x477FF000, 0x477FEFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345, 0xFF812345,
)  # fmt: skip


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def random_bits(size: int, seed: int) -> Tensor:
    """fp32 of random bits, NaNs included, the special ones among them."""
    values = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
    values[: len(SPECIAL)] = SPECIAL
    return torch.from_numpy(values.view(np.float32))


def change(tensor: Tensor, share: float, seed: int) -> Tensor:
    """A copy with a share of its elements' lowest bits flipped."""
    out = tensor.clone()
    chosen = torch.from_numpy(np.random.default_rng(seed).random(tensor.numel()) < share)
    bits(out)[chosen] ^= 1
    return out


def assert_same(got: Delta, expected: Delta) -> None:
    np.testing.assert_array_equal(got.formats, expected.formats)
    np.testing.assert_array_equal(got.offsets, expected.offsets)
    np.testing.assert_array_equal(got.payload, expected.payload)
    assert (got.num_elements, got.dtype, got.num_changed) == (
        expected.num_elements,
        expected.dtype,
        expected.num_changed,
    )


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.0, BlockFormat.SAME),
        (0.01, BlockFormat.SPARSE),
        (0.2, BlockFormat.BITMASK),
        (1.0, BlockFormat.DENSE),
    ],
)
def test_a_cast_delta_equals_the_reference_in_every_format(
    dtype: torch.dtype, share: float, expected: BlockFormat
) -> None:
    master = random_bits(SIZE, 1)
    old = torch.from_numpy(np.zeros(0)).to(dtype)
    old = torch.empty(SIZE, dtype=dtype)
    reference.cast_and_diff(master, old, backend="reference")
    old = change(old, share, 2)
    ours, theirs = old.clone(), old.clone()
    got = cuda.encode([master], ours, update=True).to_host()
    assert_same(got, reference.cast_and_diff(master, theirs, backend="reference"))
    assert torch.equal(bits(ours), bits(theirs))
    assert set(got.formats.tolist()) == {expected}
    restored = old.clone()
    cuda.apply(cuda.DeviceDelta.from_host(got, CPU), restored)
    assert torch.equal(bits(restored), bits(ours))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rounding_and_every_nan_is_cast_as_the_reference_casts_it(dtype: torch.dtype) -> None:
    """Against all-zero bits: the delta then holds the cast values themselves."""
    master = random_bits(BLOCK_ELEMENTS, 5)
    ours, theirs = torch.zeros(BLOCK_ELEMENTS, dtype=dtype), torch.zeros(BLOCK_ELEMENTS, dtype=dtype)
    cuda.encode([master], ours, update=True)
    reference.cast_and_diff(master, theirs, backend="reference")
    assert torch.equal(bits(ours), bits(theirs))


def test_pieces_join_across_their_borders_at_any_alignment() -> None:
    sizes = [1, 0, 7, 8, 100, 4096, 65_000, 3, 40_000]
    whole = random_bits(sum(sizes), 3)
    storage = torch.zeros(sum(sizes) + 4 * len(sizes))
    pieces, at = [], 0
    for index, piece in enumerate(whole.split(sizes)):
        at += index % 4  # 0, 4, 8 and 12 bytes beside 16
        pieces.append(storage[at : at + piece.numel()])
        bits(pieces[-1]).copy_(bits(piece))
        at += piece.numel()
    ours, theirs = torch.zeros(sum(sizes) + 1).bfloat16(), torch.zeros(sum(sizes)).bfloat16()
    got = cuda.encode(pieces, ours[1:], update=True).to_host()  # and a published copy off its alignment
    assert_same(got, reference.cast_and_diff(whole, theirs, backend="reference"))
    assert torch.equal(bits(ours[1:]), bits(theirs))
    assert ours[0] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("update", [False, True])
def test_diff_compares_bits_and_leaves_old_alone_unless_asked(dtype: torch.dtype, update: bool) -> None:
    new = random_bits(SIZE, 7).to(dtype)
    old = change(new, 0.03, 8)
    before = old.clone()
    got = cuda.encode([new], old, update=update).to_host()
    assert_same(got, reference.diff(new, before.clone(), backend="reference"))
    assert torch.equal(bits(old), bits(new if update else before))


def test_random_sequences_round_trip() -> None:
    """Each step's delta brings the receiver to the learner's bits; densities from none to all."""
    rng = np.random.default_rng(11)
    master = random_bits(2000, 12)
    published = torch.zeros(2000).bfloat16()
    received = published.clone()
    for step in range(250):
        master = change(master, float(rng.random() ** 4) if step % 7 else 1.0, step)
        bits(master)[:] += int(rng.integers(0, 3)) << 15
        delta = cuda.encode([master], published, update=True)
        reference.validate(delta.to_host())
        cuda.apply(delta, received)
        assert torch.equal(bits(received), bits(published))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_slices_land_where_the_table_says(source: torch.dtype, share: float) -> None:
    """Plain, fused, tied, column-sharded, transposed and cast destinations."""
    runs = [
        Run(0, 4_000, 0, 100),  # plain, a part of something fused
        Run(0, 4_000, 1, 0),  # tied
        Run(5_000, 30, 1, 4_000, rows=100, source_stride=64),  # a shard of columns
        Run(20_000, 37, 2, 0, rows=300, row_stride=1, column_stride=300),  # transposed
        Run(60_000, 10_000, 3, 5),  # across the border of two blocks, to another dtype
    ]
    sizes = [5_000, 8_000, 37 * 300, 11_000]
    table = SliceTable.build(SIZE, sizes, runs)
    new = random_bits(SIZE, 21).to(source)
    delta = reference.diff(new, change(new, share, 22), backend="reference")
    dtypes = [source, source, source, torch.float16]
    ours = [torch.ones(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    theirs = [each.clone() for each in ours]
    cuda.apply_slices(cuda.DeviceDelta.from_host(delta, CPU), cuda.DeviceTable(table, ours), cast=True)
    reference.apply_slices(delta, table, theirs, cast=True, backend="reference")
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(bits(mine), bits(other))


def test_an_empty_tensor_has_an_empty_delta() -> None:
    delta = cuda.encode([torch.zeros(0)], torch.zeros(0).bfloat16(), update=True).to_host()
    assert (delta.num_blocks, delta.payload.size, delta.offsets.tolist()) == (0, 0, [0])
    reference.validate(delta)


def test_what_does_not_fit_is_refused() -> None:
    flat = torch.zeros(8)
    with pytest.raises(ShapeError, match="have 8 elements, old 9"):
        cuda.encode([flat], torch.zeros(9).bfloat16(), update=True)
    with pytest.raises(ShapeError, match="without update"):
        cuda.encode([flat], torch.zeros(8).bfloat16(), update=False)
    with pytest.raises(ShapeError, match=r"expected float32 or torch\.float16"):
        cuda.encode([flat.bfloat16()], flat.half(), update=True)
    with pytest.raises(ShapeError, match="contiguous: False"):
        cuda.encode([torch.zeros(8, 2)[:, 0]], flat.bfloat16(), update=True)
    delta = cuda.encode([flat], torch.ones(8).bfloat16(), update=True)
    with pytest.raises(ShapeError, match="destination has 9"):
        cuda.apply(delta, torch.zeros(9).bfloat16())
    with pytest.raises(ShapeError, match="pass cast=True"):
        cuda.apply_slices(delta, cuda.DeviceTable(SliceTable.identity(8), [flat]))


def test_offsets_beyond_32_bits() -> None:
    """Blocks around element 2^31 and 2^32 of a tensor of which only their pages exist."""
    size = 2**32 + 3 * BLOCK_ELEMENTS // 2
    lib = library()
    for first_block in (2**31 // BLOCK_ELEMENTS, 2**32 // BLOCK_ELEMENTS):
        start, count = first_block * BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS
        count = min(count, size - start)
        published, master = sparse_memory(2 * size), sparse_memory(4 * size)
        old = torch.frombuffer(published, dtype=torch.bfloat16, count=count, offset=2 * start)
        new = torch.frombuffer(master, dtype=torch.float32, count=count, offset=4 * start)
        new[:] = change(torch.randn(count), 0.0, 0)
        old[:] = change(new.bfloat16(), 0.01, start)
        before, expected = old.clone(), old.clone()
        theirs = reference.cast_and_diff(new.clone(), expected, backend="reference")
        num_blocks = -(-count // BLOCK_ELEMENTS)
        base, source = old.data_ptr() - 2 * start, new.data_ptr() - 4 * start
        pointers, starts = torch.tensor([source]), torch.tensor([0, size])
        marks = torch.empty(num_blocks * BLOCK_ELEMENTS // 8, dtype=torch.uint8)
        counts = torch.empty(num_blocks, dtype=torch.int32)
        where = (first_block, num_blocks)
        lib.call(
            "delta_compare", CPU, pointers, starts, 1, 2, base, 0, size, 1, *where, marks, counts
        )  # fmt: skip
        assert torch.equal(bits(old), bits(expected))
        formats = torch.zeros(first_block + num_blocks, dtype=torch.uint8)
        offsets = torch.zeros(first_block + num_blocks + 1, dtype=torch.int64)
        formats[first_block:] = torch.from_numpy(theirs.formats)
        offsets[first_block:] = torch.from_numpy(theirs.offsets)
        payload = torch.empty(theirs.payload.size, dtype=torch.uint8)
        lib.call(
            "delta_encode", CPU, base, 0, size, marks, formats, offsets, *where, payload
        )  # fmt: skip
        np.testing.assert_array_equal(payload.numpy(), theirs.payload)
        old[:] = before
        lib.call("delta_apply", CPU, formats, offsets, payload, 0, size, *where, base)
        assert torch.equal(bits(old), bits(expected))
        del old, new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_rounds_as_torch_rounds_and_keeps_a_nan_s_sign_and_payload(dtype: torch.dtype) -> None:
    """An oracle of its own: torch for numbers and infinities, the top bits of the payload for a NaN."""
    master = random_bits(BLOCK_ELEMENTS, 31)
    ours = torch.zeros(BLOCK_ELEMENTS, dtype=dtype)
    cuda.encode([master], ours, update=True)
    is_nan = master.isnan()
    assert torch.equal(bits(ours)[~is_nan], bits(master.to(dtype))[~is_nan])
    words, halves = bits(master)[is_nan], bits(ours)[is_nan].int() & 0xFFFF
    shift, exponent = (16, 0x7F80) if dtype == torch.bfloat16 else (13, 0x7C00)
    payload_bits = 0x7F if dtype == torch.bfloat16 else 0x3FF
    quiet = 0x40 if dtype == torch.bfloat16 else 0x200
    assert torch.equal(halves & 0x8000, (words >> 16) & 0x8000)
    assert (halves & exponent == exponent).all()
    assert torch.equal(halves & payload_bits, ((words >> shift) & payload_bits) | quiet)


@pytest.mark.parametrize("share", [0.01, 0.2, 1.0])
def test_slices_beyond_32_bits(share: float) -> None:
    """Rows of a destination that start behind element 2^31 and lie 2^31 + 8 elements apart."""
    count, stride, first = 100, 2**31 + 8, 2**31 + 5
    far = torch.frombuffer(sparse_memory(2 * (first + 3 * stride)), dtype=torch.bfloat16)
    table = SliceTable.build(400, [far.numel()], [Run(0, count, 0, first, rows=3, row_stride=stride)])
    new = random_bits(400, 41).bfloat16()
    old = change(new, share, 42)
    rows = torch.as_strided(far, (3, count), (stride, 1), first)
    bits(rows).copy_(bits(old)[: 3 * count].view(3, count))
    delta = reference.diff(new, old.clone(), backend="reference")
    cuda.apply_slices(cuda.DeviceDelta.from_host(delta, CPU), cuda.DeviceTable(table, [far]))
    assert torch.equal(bits(rows), bits(new)[: 3 * count].view(3, count))
