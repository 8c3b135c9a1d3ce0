"""slice_table and apply_slices: fused, sharded, tied, transposed targets, checked against indexing in torch."""

import itertools

import numpy as np
import pytest
import torch

from headway_kernels import native
from headway_kernels import weight_delta as wd
from headway_kernels.errors import ShapeError
from headway_kernels.weight_delta import Run, SliceTable

WAYS = ["reference", *native.instruction_sets()]
DENSITIES = (0.003, 0.3, 1.0)


@pytest.fixture(params=WAYS)
def backend(request):
    """Each back-end and, of the native one, each instruction set."""
    if request.param == "reference":
        yield "reference"
        return
    native.force_instruction_set(request.param)
    yield "cpu"
    native.force_instruction_set(None)


def push(rng, size, density, dtype=torch.bfloat16):
    """An old state, a new one, and the delta between them."""
    old = torch.from_numpy(rng.standard_normal(size).astype(np.float32)).to(dtype)
    fresh = torch.from_numpy(rng.standard_normal(size).astype(np.float32)).to(dtype)
    new = torch.where(torch.from_numpy(rng.random(size) < density), fresh, old)
    return old, new, wd.diff(new, old)


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_models_targets_get_what_a_loader_would_give_them(backend, density, dtype):
    """One source, five parameters over three blocks: q, k, v fused; a row shard, a column shard; tied; transposed."""
    hidden = 96
    shapes = {
        "q": (300, hidden),
        "k": (100, hidden),
        "v": (100, hidden),
        "out": (hidden, 1000),
        "embed": (500, hidden),
    }
    sizes = {name: rows * columns for name, (rows, columns) in shapes.items()}
    starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    total = sum(sizes.values())
    assert total > 2 * wd.BLOCK_ELEMENTS

    def load(flat):
        part = {name: flat[starts[name] : starts[name] + sizes[name]].view(shapes[name]) for name in shapes}
        return [
            torch.cat([part["q"], part["k"], part["v"]]).clone(),  # fused
            part["q"][100:200].clone(),  # a shard of rows
            part["out"][:, 250:500].clone(),  # a shard of columns
            part["out"].t().contiguous(),  # transposed
            part["embed"].clone(),
            part["embed"].clone(),  # tied
        ]

    runs = [
        Run(starts["q"], sizes["q"], 0, 0),
        Run(starts["k"], sizes["k"], 0, sizes["q"]),
        Run(starts["v"], sizes["v"], 0, sizes["q"] + sizes["k"]),
        Run(starts["q"] + 100 * hidden, 100 * hidden, 1, 0),
        Run(starts["out"] + 250, 250, 2, 0, rows=hidden, source_stride=1000),
        Run(starts["out"], 1000, 3, 0, rows=hidden, row_stride=1, column_stride=hidden),
        Run(starts["embed"], sizes["embed"], 4, 0),
        Run(starts["embed"], sizes["embed"], 5, 0),
    ]
    old, new, delta = push(np.random.default_rng(5), total, density, dtype)
    targets = load(old)
    table = SliceTable.build(total, [target.numel() for target in targets], runs)
    assert table.is_complete
    wd.apply_slices(delta, table, targets, backend=backend)
    for got, expected in zip(targets, load(new), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("density", DENSITIES)
def test_random_rectangles_land_where_indexing_says(backend, density):
    rng = np.random.default_rng(int(density * 1000))
    for _ in range(12):
        rows, columns = int(rng.integers(1, 400)), int(rng.integers(1, 400))
        start, tail = int(rng.integers(0, 70_000)), int(rng.integers(0, 50))
        low = int(rng.integers(0, columns))
        high = int(rng.integers(low + 1, columns + 1))
        first, last = sorted(rng.choice(rows + 1, 2, replace=False).tolist())
        old, new, delta = push(rng, start + rows * columns + tail, density)
        transposed = bool(rng.random() < 0.5)
        kept = high - low
        height = last - first
        run = Run(
            start + first * columns + low, kept, 0, 3, rows=height, source_stride=columns,
            row_stride=1 if transposed else kept, column_stride=height if transposed else 1,
        )  # fmt: skip

        def expected(flat, shape=(rows, columns), begin=start, box=(first, last, low, high), flip=transposed):
            matrix = flat[begin : begin + shape[0] * shape[1]].view(shape)[box[0] : box[1], box[2] : box[3]]
            return (matrix.t() if flip else matrix).reshape(-1)

        target = torch.full((height * kept + 3,), 5.0, dtype=torch.bfloat16)
        target[3:] = expected(old)
        table = SliceTable.build(delta.num_elements, [target.numel()], [run])
        wd.apply_slices(delta, table, [target], backend=backend)
        assert torch.equal(target[3:], expected(new))
        assert (target[:3] == 5).all()


def test_many_small_targets_in_one_block(backend):
    old, new, delta = push(np.random.default_rng(3), 80_000, 0.2)
    count = 80_000 // 8
    targets = [old[8 * i : 8 * i + 8].clone() for i in range(count)]
    table = SliceTable.build(80_000, [8] * count, [Run(8 * i, 8, i, 0) for i in range(count)])
    wd.apply_slices(delta, table, targets, backend=backend)
    assert torch.equal(torch.cat(targets), new)


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_another_dtype_is_refused_or_cast_as_asked(backend, source_dtype, target_dtype):
    for density in DENSITIES:
        old, new, delta = push(np.random.default_rng(4), 70_000, density, source_dtype)
        runs = [Run(0, 30_000, 0, 0), Run(30_000, 200, 0, 30_000, rows=200, row_stride=1, column_stride=200)]
        table = SliceTable.build(70_000, [70_000], runs)
        target = torch.cat([old[:30_000], old[30_000:].view(200, 200).t().reshape(-1)]).to(target_dtype)
        if source_dtype != target_dtype:
            with pytest.raises(ShapeError, match="destination 0 is"):
                wd.apply_slices(delta, table, [target], backend=backend)
        wd.apply_slices(delta, table, [target], cast=True, backend=backend)
        expected = torch.cat([new[:30_000], new[30_000:].view(200, 200).t().reshape(-1)]).to(target_dtype)
        assert torch.equal(target, expected)


def test_elements_without_a_run_land_nowhere():
    _, _, delta = push(np.random.default_rng(1), 1000, 1.0)
    target = torch.zeros(10, dtype=torch.bfloat16)
    table = SliceTable.build(1000, [10], [Run(100, 4, 0, 2)])
    assert not table.is_complete
    wd.apply_slices(delta, table, [target])
    assert target[[0, 1, 6, 7, 8, 9]].eq(0).all()
    assert target[2:6].ne(0).all()


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([Run(95, 10, 0, 0)], "leaves the source"),
        ([Run(-1, 10, 0, 0)], "leaves the source"),
        ([Run(0, 10, 0, 45)], "leaves its destination"),
        ([Run(0, 10, 0, -1)], "leaves its destination"),
        ([Run(0, 10, 2, 0)], "not one of 2"),
        ([Run(0, 0, 0, 0)], "positive"),
        ([Run(0, 10, 0, 0, rows=2, source_stride=5)], "source_stride >= row_length"),
        ([Run(0, 5, 0, 0, rows=3, row_stride=2)], "twice"),
        ([Run(0, 10, 0, 0), Run(20, 10, 0, 9)], "two runs write the same element of destination 0"),
        ([Run(0, 3, 0, 0, rows=5, row_stride=6), Run(20, 4, 0, 3, rows=5, row_stride=6)], "two runs write"),
    ],
)
def test_a_wrong_run_is_refused_with_its_numbers(runs, message):
    with pytest.raises(ShapeError, match=message):
        SliceTable.build(100, [50, 50], runs)


def test_interleaved_column_shards_share_a_destination():
    runs = [Run(0, 3, 0, 0, rows=5, row_stride=6), Run(20, 3, 0, 3, rows=5, row_stride=6)]
    table = SliceTable.build(100, [30], runs)
    source = torch.arange(100.0)
    target = torch.zeros(30)
    wd.apply_slices(wd.whole(source), table, [target])
    expected = torch.cat([source[:15].view(5, 3), source[20:35].view(5, 3)], 1)
    assert torch.equal(target.view(5, 6), expected)


def test_destinations_of_another_size_or_layout_are_refused():
    table = SliceTable.identity(6)
    delta = wd.whole(torch.ones(6))
    with pytest.raises(ShapeError, match="destination 0 has 5 elements"):
        wd.apply_slices(delta, table, [torch.zeros(5)])
    with pytest.raises(ShapeError, match="expected 6 contiguous"):
        wd.apply_slices(delta, table, [torch.zeros(2, 3).t()])
    with pytest.raises(ShapeError, match="2 destinations; the table has 1"):
        wd.apply_slices(delta, table, [torch.zeros(6)] * 2)
    with pytest.raises(ShapeError, match="of 6 elements, the table of 7"):
        wd.apply_slices(delta, SliceTable.identity(7), [torch.zeros(7)])
