"""weight_delta: bit-exact in every format, on every instruction set, and deaf to malformed bytes.

The oracles are torch's own casts (where a value is a number), bit arithmetic on Python integers (where it is a NaN),
and plain assignment of the new values.
"""

import dataclasses
import itertools
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_kernels import delta_format, native
from headway_kernels import weight_delta as wd
from headway_kernels.errors import BackendUnavailable, MalformedDelta, ShapeError, UnsupportedOption

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WAYS = ["reference", *native.instruction_sets()]
# A block, its neighbours, one word of 64 and one vector less and more, several blocks with a short last one.
SIZES = (1, 7, 63, 64, 65, 8191, 65_535, 65_536, 65_537, 65_536 * 2 + 4_321)
DENSITIES = (0.0, 1e-4, 0.01, 0.06, 0.07, 0.5, 0.95, 1.0)
HARD = (
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00008000, 0x00018000, 0x3F808000, 0x3F818000, 0x7F7FFFFF,
    0xFF7F8000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFF8000FF, 0x7FC00000, 0xFFC12345, 0x7FFFFFFF, 0x7FBFFFFF,
    0x477FE000, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x32FFFFFF, 0x387FC000, 0x387FE000, 0x38800000,
)  # fmt: skip


@pytest.fixture(params=WAYS)
def backend(request):
    """Each back-end and, of the native one, each instruction set."""
    if request.param == "reference":
        yield "reference"
        return
    native.force_instruction_set(request.param)
    yield "cpu"
    native.force_instruction_set(None)


def bits(tensor):
    whole = torch.int32 if tensor.element_size() == 4 else torch.int16
    return tensor.view(whole)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def random_floats(rng, size):
    """Any bit pattern: numbers of all sizes, subnormals, infinities, NaNs of all payloads, both zeros."""
    raw = rng.integers(0, 1 << 32, size, dtype=np.uint64).astype(np.uint32)
    usual = rng.standard_normal(size).astype(np.float32).view(np.uint32)
    chosen = np.where(rng.random(size) < 0.5, raw, usual)
    hard = rng.random(size) < 0.1
    chosen[hard] = rng.choice(np.array(HARD, np.uint32), int(hard.sum()))
    return torch.from_numpy(chosen.view(np.float32))


def changed_copy(rng, values, density):
    """A copy in which about this share of the elements has other bits."""
    fresh = random_floats(rng, values.numel())
    chosen = torch.from_numpy(rng.random(values.numel()) < density)
    return torch.where(chosen, fresh.view(torch.int32), values.view(torch.int32)).view(torch.float32)


def cast_by_hand(word, dtype):
    """One float32 bit pattern cast by Python integers; NaNs by the documented rule."""
    if dtype == torch.float32:
        return word
    sign, nan = word >> 31, (word & 0x7FFFFFFF) > 0x7F800000
    if dtype == torch.bfloat16:
        return (word >> 16) | 0x40 if nan else (word + 0x7FFF + (word >> 16 & 1)) >> 16
    if nan:
        return sign << 15 | 0x7E00 | (word >> 13 & 0x3FF)
    value = struct.unpack("<f", struct.pack("<I", word))[0]
    if abs(value) >= 65520.0:
        return sign << 15 | 0x7C00
    return struct.unpack("<H", struct.pack("<e", value))[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_is_the_processors_and_torchs(backend, dtype):
    rng = np.random.default_rng(3)
    master = torch.cat(
        [torch.from_numpy(np.array(HARD * 5, np.uint32).view(np.float32)), random_floats(rng, 5000)]
    )
    published = torch.zeros(master.numel(), dtype=dtype)
    wd.cast_and_diff(master, published, backend=backend)
    words = master.view(torch.int32).numpy().view(np.uint32).tolist()
    expected = np.array([cast_by_hand(word, dtype) for word in words], np.uint32)
    got = bits(published).numpy().view(np.uint32 if dtype == torch.float32 else np.uint16)
    np.testing.assert_array_equal(got, expected.astype(got.dtype))
    numbers = ~master.isnan()
    assert same_bits(published[numbers], master.to(dtype)[numbers])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_changed_arrives_bit_for_bit_at_every_density(backend, dtype, size):
    rng = np.random.default_rng(size)
    master = random_floats(rng, size)
    published = torch.zeros(size, dtype=dtype)
    wd.cast_and_diff(master, published, backend="reference")
    replica = published.clone()
    for density in DENSITIES:
        master = changed_copy(rng, master, density)
        before = published.clone()
        delta = wd.cast_and_diff(master, published, backend=backend)
        differing = int((bits(before) != bits(published)).sum())
        assert delta.num_changed == differing
        assert delta.payload.size <= size * published.element_size()
        received = wd.from_bytes(wd.to_bytes(delta), backend=backend)
        wd.apply_delta(received, replica, backend=backend)
        assert same_bits(replica, published)


def test_every_format_is_chosen_where_it_is_smallest(backend):
    size = 65_536
    for count, value_bytes in itertools.product((0, 1, 4095, 4096, 4097, 61_440, 61_441, 65_536), (2, 4)):
        dtype = torch.bfloat16 if value_bytes == 2 else torch.float32
        old, new = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        new[torch.randperm(size, generator=torch.Generator().manual_seed(count))[:count]] = 1.0
        delta = wd.diff(new, old, backend=backend)
        sizes = {
            wd.SPARSE: count * (2 + value_bytes),
            wd.BITMASK: 8192 + count * value_bytes,
            wd.DENSE: size * value_bytes,
        }
        expected = wd.SAME if count == 0 else min(sizes, key=lambda kind: (sizes[kind], kind))
        assert delta.formats.tolist() == [expected]
        assert delta.payload.size == (0 if count == 0 else sizes[expected])


def test_all_ways_encode_the_same_bytes():
    rng = np.random.default_rng(8)
    old = random_floats(rng, 200_000)
    densities = torch.from_numpy(np.repeat([0.0, 0.03, 0.4, 1.0], 50_000))
    new = torch.where(torch.from_numpy(rng.random(200_000)) < densities, random_floats(rng, 200_000), old)
    for dtype in DTYPES:
        expected = wd.to_bytes(wd.cast_and_diff(new, old.to(dtype, copy=True), backend="reference"))
        for name in native.instruction_sets():
            native.force_instruction_set(name)
            try:
                assert wd.to_bytes(wd.cast_and_diff(new, old.to(dtype, copy=True), backend="cpu")) == expected
            finally:
                native.force_instruction_set(None)


@pytest.mark.skipif(not native.available(), reason="no native library was built")
def test_threads_do_not_change_a_byte():
    rng = np.random.default_rng(9)
    master = random_floats(rng, 65_536 * 5 + 77)
    published = changed_copy(rng, master, 0.3).to(torch.bfloat16)
    threads = torch.get_num_threads()
    seen = set()
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            first = wd.cast_and_diff(master, published.clone())
            second = wd.cast_and_diff(changed_copy(np.random.default_rng(1), master, 0.2), published.clone())
            seen.add((wd.to_bytes(first), wd.to_bytes(wd.merge(first, second))))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


def test_diff_leaves_or_updates_the_old_values(backend):
    rng = np.random.default_rng(4)
    for dtype in DTYPES:
        new = random_floats(rng, 70_001).to(dtype)
        old = torch.where(torch.from_numpy(rng.random(70_001) < 0.5), new, torch.ones((), dtype=dtype))
        kept, replica = old.clone(), old.clone()
        delta = wd.diff(new, old, backend=backend)
        assert same_bits(old, kept)
        again = wd.diff(new, old, update=True, backend=backend)
        assert same_bits(old, new)
        assert wd.to_bytes(delta) == wd.to_bytes(again)
        wd.apply_delta(delta, replica, backend=backend)
        assert same_bits(replica, new)


def test_signed_zeros_differ_and_equal_nans_do_not(backend):
    old = torch.tensor([0.0, -0.0, float("nan"), float("nan")])
    new = torch.tensor([-0.0, -0.0, float("nan"), -float("nan")])
    delta = wd.diff(new, old, backend=backend)
    changed, _ = delta_format.split_block(delta, 0)
    assert changed.tolist() == [0, 3]


def test_a_master_in_pieces_is_as_one(backend):
    rng = np.random.default_rng(6)
    lengths = [0, 1, 63, 64, 65, 30_000, 0, 35_343, 1, 70_000, 5]
    pieces = [random_floats(rng, length) for length in lengths]
    published = changed_copy(rng, torch.cat(pieces), 0.2).to(torch.bfloat16)
    other = published.clone()
    expected = wd.cast_and_diff(torch.cat(pieces), published, backend="reference")
    got = wd.cast_and_diff(pieces, other, backend=backend)
    assert wd.to_bytes(got) == wd.to_bytes(expected)
    assert same_bits(other, published)


def test_a_callers_buffer_is_used_and_a_short_one_refused(backend):
    new, old = torch.ones(70_000), torch.zeros(70_000)
    room = np.zeros(280_000, np.uint8)
    delta = wd.diff(new, old, payload=room, backend=backend)
    assert np.shares_memory(delta.payload, room)
    assert delta.payload.size == 280_000
    with pytest.raises(ShapeError, match="at least 280000 bytes"):
        wd.diff(new, old, payload=room[:-1], backend=backend)
    room.flags.writeable = False
    with pytest.raises(ShapeError, match="read-only"):
        wd.diff(new, old, payload=room, backend=backend)


def test_a_thousand_random_sequences_end_bit_equal():
    """Each: a state, several deltas, some merged because they were skipped, all through bytes; back-ends alternate."""
    rng = np.random.default_rng(11)
    ways = ["reference", *native.instruction_sets()]
    try:
        for sequence in range(1000):
            dtype = DTYPES[sequence % 3]
            size = (
                int(rng.choice([1, 64, 300, 1000, 65_537]))
                if sequence % 50 == 0
                else int(rng.integers(1, 700))
            )
            way = ways[sequence % len(ways)]
            native.force_instruction_set(None if way == "reference" else way)
            name = "reference" if way == "reference" else "cpu"
            master = random_floats(rng, size)
            published = torch.zeros(size, dtype=dtype)
            replica = published.clone()
            waiting = None
            for _ in range(int(rng.integers(1, 5))):
                master = changed_copy(rng, master, float(rng.choice(DENSITIES)))
                delta = wd.cast_and_diff(master, published, backend=name)
                waiting = delta if waiting is None else wd.merge(waiting, delta, backend=name)
                if rng.random() < 0.6:
                    wd.apply_delta(wd.from_bytes(wd.to_bytes(waiting), backend=name), replica, backend=name)
                    waiting = None
            if waiting is not None:
                wd.apply_delta(waiting, replica, backend=name)
            assert same_bits(replica, published), sequence
    finally:
        native.force_instruction_set(None)


def test_merging_is_applying_one_after_the_other_for_all_pairs_of_formats(backend):
    size = 65_536 + 1000
    rng = np.random.default_rng(12)
    for first, second in itertools.product((0.0, 0.01, 0.3, 0.97, 1.0), repeat=2):
        base = random_floats(rng, size).to(torch.bfloat16)
        middle = changed_copy(rng, base.float(), first).to(torch.bfloat16)
        last = changed_copy(rng, middle.float(), second).to(torch.bfloat16)
        older, newer = wd.diff(middle, base), wd.diff(last, middle)
        merged = wd.merge(older, newer, backend=backend)
        wd.validate(merged, backend=backend)
        assert wd.to_bytes(merged) == wd.to_bytes(wd.merge(older, newer, backend="reference"))
        wd.apply_delta(merged, base, backend=backend)
        assert same_bits(base, last)


def test_a_whole_state_is_a_delta_over_anything():
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    delta = wd.whole(values)
    wd.validate(delta)
    assert delta.payload.ctypes.data == values.data_ptr()
    target = torch.full((70_000,), 7.0, dtype=torch.bfloat16)
    wd.apply_delta(wd.from_bytes(wd.to_bytes(delta)), target)
    assert same_bits(target, values)


def test_an_empty_tensor_has_an_empty_delta(backend):
    delta = wd.cast_and_diff(torch.empty(0), torch.empty(0, dtype=torch.bfloat16), backend=backend)
    assert (delta.num_blocks, delta.num_changed, delta.payload.size) == (0, 0, 0)
    again = wd.from_bytes(wd.to_bytes(wd.merge(delta, delta, backend=backend)), backend=backend)
    wd.apply_delta(again, torch.empty(0, dtype=torch.bfloat16), backend=backend)


def good_delta(density=0.01, dtype=torch.bfloat16, size=65_536 + 1003):
    rng = np.random.default_rng(2)
    old = random_floats(rng, size)
    return wd.diff(changed_copy(rng, old, density).to(dtype), old.to(dtype, copy=True), backend="reference")


def spoiled(delta, **changes):
    copies = {name: getattr(delta, name).copy() for name in ("formats", "offsets", "payload")}
    for name, change in changes.items():
        if callable(change):
            change(copies[name])
        else:
            copies[name] = change
    return dataclasses.replace(delta, **copies)


def set_at(index, value):
    def change(array):
        array[index] = value

    return change


def swap_first_indices(payload):
    payload[0:4] = payload[[2, 3, 0, 1]]


def mark_behind_the_end(payload):
    payload[125] |= 0x80  # of a bitmask of 1003 elements, in 126 bytes: the last has 3


MALFORMED = {
    "unknown format": (0.01, {"formats": set_at(0, 4)}, "4 is not a valid"),
    "sparse called same": (0.01, {"formats": set_at(0, 0)}, "unchanged block has"),
    "sparse called dense": (0.01, {"formats": set_at(0, 3)}, "dense block"),
    "sparse called bitmask": (0.01, {"formats": set_at(1, 2)}, "bitmask"),
    "dense called bitmask": (1.0, {"formats": set_at(0, 2)}, "bitmask"),
    "index out of order": (0.01, {"payload": swap_first_indices}, "strictly ascending"),
    "index twice": (0.01, {"payload": lambda p: p.__setitem__(slice(2, 4), p[0:2])}, "strictly ascending"),
    "offset falls": (0.01, {"offsets": set_at(1, -4)}, "offsets must rise"),
    "offset beyond": (0.01, {"offsets": set_at(1, 1 << 60)}, "offsets must rise"),
    "offset not from 0": (0.01, {"offsets": set_at(0, 4)}, "offsets must rise"),
    "offset between values": (0.01, {"offsets": lambda o: o.__setitem__(1, o[1] - 3)}, "sparse block"),
    "too many offsets": (0.01, {"offsets": np.zeros(9, np.int64)}, "offsets is int64"),
    "too few formats": (0.01, {"formats": np.zeros(1, np.uint8)}, "formats is uint8"),
    "count too small": (0.3, {"num_changed": 3}, "num_changed is 3"),
    "count too large": (0.01, {"num_changed": 66_000}, "num_changed is 66000"),
    "negative size": (0.01, {"num_elements": -1}, "num_elements is -1"),
    "other size": (0.01, {"num_elements": 65_536}, "formats is uint8"),
    "other dtype": (0.01, {"dtype": torch.float64}, "dtype torch.float64"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_delta_is_refused_with_its_fault(backend, fault):
    density, changes, message = MALFORMED[fault]
    delta = good_delta(density)
    wd.validate(delta, backend=backend)
    arrays = {k: v for k, v in changes.items() if k in ("formats", "offsets", "payload")}
    rest = {k: v for k, v in changes.items() if k not in arrays}
    bad = dataclasses.replace(spoiled(delta, **arrays), **rest)
    with pytest.raises(MalformedDelta, match=message):
        wd.validate(bad, backend=backend)


def test_an_index_or_a_mark_behind_a_short_last_block_is_refused(backend):
    sparse = good_delta(0.05)
    at = int(sparse.offsets[1])
    count = (int(sparse.offsets[2]) - at) // 4
    last = sparse.payload[at + 2 * count - 2 : at + 2 * count].view(np.uint16)
    far = spoiled(sparse, payload=lambda p: p[at + 2 * count - 2 : at + 2 * count].view(np.uint16).fill(1003))
    assert int(last[0]) < 1003
    with pytest.raises(MalformedDelta, match=r"block 1 of 2: sparse indices must be .* below 1003"):
        wd.validate(far, backend=backend)
    mask = good_delta(0.5, size=1003)
    assert mask.formats.tolist() == [wd.BITMASK]
    with pytest.raises(MalformedDelta, match="behind its end"):
        wd.validate(spoiled(mask, payload=mark_behind_the_end), backend=backend)
    with pytest.raises(MalformedDelta, match="followed by"):
        wd.validate(spoiled(mask, payload=lambda p: p.__setitem__(0, p[0] ^ 1)), backend=backend)


def test_cut_or_padded_bytes_are_refused(backend):
    data = wd.to_bytes(good_delta(0.1, size=300))
    for length in range(len(data)):
        with pytest.raises(MalformedDelta):
            wd.from_bytes(data[:length], backend=backend)
    with pytest.raises(MalformedDelta, match="its header says"):
        wd.from_bytes(data + b"\0", backend=backend)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_bytes_are_refused_or_apply_within_bounds(data):
    raw = bytearray(wd.to_bytes(good_delta(data.draw(st.sampled_from((0.02, 0.4, 1.0))), size=400)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    answers = []
    for name in ("reference", "cpu") if native.available() else ("reference",):
        guarded = torch.full((600,), 9.0, dtype=torch.bfloat16)
        try:
            delta = wd.from_bytes(bytes(raw), backend=name)
            wd.apply_delta(delta, guarded[100:500], backend=name)
            answers.append("applied")
        except (MalformedDelta, ShapeError) as refused:
            answers.append(str(refused))
        assert (guarded[:100] == 9).all()
        assert (guarded[500:] == 9).all()
    assert len(set(answers)) == 1


def test_bytes_at_any_address_are_read(backend):
    delta = good_delta(0.03)
    data = wd.to_bytes(delta)
    for shift in range(8):
        moved = np.zeros(len(data) + 8, np.uint8)
        moved[shift : shift + len(data)] = np.frombuffer(data, np.uint8)
        again = wd.from_bytes(moved[shift : shift + len(data)], backend=backend)
        assert wd.to_bytes(again) == data


def test_what_does_not_fit_is_refused_by_name():
    delta = good_delta()
    with pytest.raises(ShapeError, match="destination has 5 elements"):
        wd.apply_delta(delta, torch.zeros(5, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match=r"destination is torch\.float32"):
        wd.apply_delta(delta, torch.zeros(delta.num_elements))
    with pytest.raises(ShapeError, match="published is"):
        wd.cast_and_diff(torch.zeros(4), torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ShapeError, match="master is"):
        wd.cast_and_diff(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="master has 3 elements, published 4"):
        wd.cast_and_diff(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ShapeError, match="contiguous: False"):
        wd.diff(torch.zeros(8)[::2], torch.zeros(4))
    with pytest.raises(ShapeError, match="cannot merge"):
        wd.merge(delta, good_delta(size=10))
    with pytest.raises(UnsupportedOption, match="backend 'gpu'"):
        wd.apply_delta(delta, torch.zeros(delta.num_elements, dtype=torch.bfloat16), backend="gpu")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "why_not", lambda: "a test took it away")
    with pytest.raises(BackendUnavailable, match="a test took it away"):
        wd.diff(torch.zeros(4), torch.zeros(4), backend="cpu")
    assert wd.diff(torch.ones(4), torch.zeros(4)).num_changed == 4
