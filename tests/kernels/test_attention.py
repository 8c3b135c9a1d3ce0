"""attention: both backends against a loop over queries in float64, on random plans of every kind."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_kernels import native
from headway_kernels.attention import AttentionPlan, run_attention
from headway_kernels.attention_reference import DENSE_ELEMENTS
from headway_kernels.errors import BackendUnavailable, ShapeError, UnsupportedOption

BACKENDS = ["cpu", "reference"] if native.available() else ["reference"]
HEADS = [(1, 1), (2, 2), (4, 2), (4, 1), (9, 3)]
DIMS = [1, 8, 17, 32, 64, 80, 128]  # 1, 17: padded vectors everywhere; 8, 80: not a multiple of sixteen lanes
needs_native = pytest.mark.skipif(not native.available(), reason="no native library was built")


@pytest.fixture(params=native.instruction_sets() or [None])
def instruction_set(request):
    """Each instruction set in turn; one round on the reference without the library."""
    if request.param is None:
        yield None
        return
    native.force_instruction_set(request.param)
    yield request.param
    native.force_instruction_set(None)


def keys_of_query(plan, run, j):
    """The keys of query j of a run, as the plan's docstring defines them."""
    first, last = int(plan.range_offsets[run]), int(plan.range_offsets[run + 1])
    keys = []
    for i in range(first, last):
        begin = int(plan.range_start[i])
        keys += range(begin, begin + int(plan.range_len[i]))
    begin = int(plan.causal_start[run])
    return keys + list(range(begin, begin + int(plan.causal_base[run]) + j + 1))


def oracle(query, key, value, plan, scale):
    """Query by query in float64; differentiable."""
    group = query.shape[1] // key.shape[1]
    out = [torch.zeros_like(query[0]) for _ in range(plan.num_queries)]
    for run in range(len(plan.query_len)):
        for j in range(int(plan.query_len[run])):
            token = int(plan.query_start[run]) + j
            keys = keys_of_query(plan, run, j)
            k = key[keys].repeat_interleave(group, dim=1)
            v = value[keys].repeat_interleave(group, dim=1)
            weights = torch.softmax(torch.einsum("hd,khd->hk", query[token], k) * scale, dim=1)
            out[token] = torch.einsum("hk,khd->hd", weights, v)
    return torch.stack(out) if out else torch.zeros_like(query)


def tensors(seed, plan, heads, dim, *, dtype=torch.float32, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    (num_heads, num_kv_heads), shapes = heads, []
    shapes = [(plan.num_queries, num_heads, dim)] + 2 * [(plan.num_keys, num_kv_heads, dim)]
    made = (torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes)
    return [tensor.requires_grad_(requires_grad) for tensor in made]


def relative(a, b):
    return float((a.double() - b.double()).norm() / max(float(b.double().norm()), 1e-30))


def tree_plan(node_lengths, parents):
    """A prefix forest as the packer lays it out: node after node, ancestors as full ranges."""
    starts = np.concatenate([[0], np.cumsum(node_lengths)]).tolist()
    runs = []
    for node, length in enumerate(node_lengths):
        ranges, parent = [], parents[node]
        while parent is not None:
            ranges.append((starts[parent], node_lengths[parent]))
            parent = parents[parent]
        runs.append((starts[node], length, starts[node], 0, ranges[::-1]))
    return AttentionPlan.build(runs, num_queries=starts[-1], num_keys=starts[-1])


@st.composite
def forests(draw):
    """Trees of depth <= 4, nodes of 0 to 21 tokens."""
    num_nodes = draw(st.integers(1, 9))
    lengths = draw(
        st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 21]), min_size=num_nodes, max_size=num_nodes)
    )
    parents, depth = [], []
    for node in range(num_nodes):
        candidates = [None] + [p for p in range(node) if depth[p] < 4]
        parent = draw(st.sampled_from(candidates))
        parents.append(parent)
        depth.append(1 if parent is None else depth[parent] + 1)
    return tree_plan(lengths, parents)


@st.composite
def pools(draw):
    """Decode steps and prefills over a pool with gaps, in any order, prompts shared, queries in no run."""
    num_prompts = draw(st.integers(1, 3))
    prompts, pool = [], draw(st.integers(0, 3))
    for _ in range(num_prompts):
        length = draw(st.sampled_from([0, 1, 7, 30, 70]))
        prompts.append((pool, length))
        pool += length + draw(st.integers(0, 2))
    runs, query = [], draw(st.integers(0, 2))
    lengths = draw(st.sampled_from([[1], [0, 1, 1, 1, 3, 20]]))  # a decode step alone, or with prefills
    for _ in range(draw(st.integers(0, 10))):
        length, base = draw(st.sampled_from(lengths)), draw(st.sampled_from([0, 1, 5, 66]))
        ranges = [prompts[draw(st.integers(0, num_prompts - 1))]] if draw(st.booleans()) else []
        runs.append((query, length, pool, base, ranges))
        query += length + draw(st.sampled_from([0, 0, 2]))
        pool += base + length + draw(st.integers(0, 2))
    runs = draw(st.permutations(runs))
    return AttentionPlan.build(runs, num_queries=query, num_keys=pool)


def check_against_oracle(backend, plan, heads, dim, seed):
    scale = dim**-0.5
    inputs = tensors(seed, plan, heads, dim, requires_grad=True)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    out, want = run_attention(*inputs, plan, scale=scale, backend=backend), oracle(*exact, plan, scale)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    if not want.requires_grad or want.numel() == 0:
        return
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(seed + 1))
    grads = torch.autograd.grad(out, inputs, weights)
    wanted = torch.autograd.grad(want, exact, weights.double())
    for got, wish in zip(grads, wanted, strict=True):
        assert float((got.double() - wish).norm()) <= 1e-5 * float(wish.norm()) + 1e-6 * float(weights.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(forests(), st.sampled_from(HEADS), st.sampled_from(DIMS), st.integers(0, 1000))
def test_forests_match_the_oracle_forward_and_backward(backend, plan, heads, dim, seed):
    check_against_oracle(backend, plan, heads, dim, seed)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(pools(), st.sampled_from(HEADS), st.sampled_from(DIMS), st.integers(0, 1000))
def test_decode_and_prefill_over_a_pool_match_the_oracle(backend, plan, heads, dim, seed):
    check_against_oracle(backend, plan, heads, dim, seed)


@needs_native
@pytest.mark.parametrize("dim", [8, 17, 64, 128])
def test_every_instruction_set_matches_the_oracle(instruction_set, dim):
    # Longer than a tile of rows and a block of keys, with tails; then decode runs with a shared prompt.
    plan = AttentionPlan.build(
        [(0, 150, 0, 0, []), (150, 9, 150, 0, [(0, 150)]), (159, 1, 159, 0, [(0, 150), (150, 9)])]
        + [(160 + i, 1, 200 + 10 * i, 9, [(160, 30)]) for i in range(9)],
        num_queries=170,
        num_keys=300,
    )
    check_against_oracle("cpu", plan, (4, 2), dim, seed=3)


@needs_native
def test_contexts_longer_than_a_block_of_keys_match_the_reference(instruction_set):
    runs = [(i, 1, 700 * i + 650, 40 + i, [(700 * i, 600)]) for i in range(4)] + [(4, 300, 2800, 500, [])]
    plan = AttentionPlan.build(runs, num_queries=304, num_keys=3700)
    inputs = tensors(5, plan, (4, 2), 32)
    native_out = run_attention(*inputs, plan, scale=0.2, backend="cpu")
    double = [tensor.double() for tensor in inputs]
    reference = run_attention(*double, plan, scale=0.2, backend="reference")
    torch.testing.assert_close(native_out.double(), reference, rtol=1e-5, atol=1e-5)


def test_large_problems_go_run_by_run_in_the_reference():
    side = math.isqrt(DENSE_ELEMENTS) + 100
    runs = [(0, side - 20, 0, 0, []), (side - 10, 10, side - 10, 0, [(3, 40)])]
    plan = AttentionPlan.build(runs, num_queries=side, num_keys=side)
    inputs = tensors(0, plan, (1, 1), 4, dtype=torch.float64)
    out = run_attention(*inputs, plan, scale=0.5, backend="reference")
    assert torch.equal(out[side - 20 : side - 10], torch.zeros(10, 1, 4, dtype=torch.float64))
    some = [0, 1, 700, side - 21, side - 10, side - 1]
    for token in some:
        run, j = (0, token) if token < side - 20 else (1, token - (side - 10))
        keys = keys_of_query(plan, run, j)
        weights = torch.softmax(inputs[1][keys, 0] @ inputs[0][token, 0] * 0.5, dim=0)
        torch.testing.assert_close(out[token, 0], weights @ inputs[2][keys, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_views_give_the_same_bits_as_contiguous_tensors(backend):
    plan = tree_plan([20, 5, 1, 33], [None, 0, 1, None])
    query, key, value = tensors(1, plan, (4, 2), 32)
    by_head = query.transpose(0, 1).contiguous().transpose(0, 1)  # what the transformers library hands over
    pool = torch.full((plan.num_keys, 2, 3, 40), math.nan)
    pool[:, 0, :2, :32], pool[:, 1, :2, :32] = key, value
    views = (by_head, pool[:, 0, :2, :32], pool[:, 1, :2, :32])
    assert not any(view.is_contiguous() for view in views)
    packed = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    strided = [view.detach().requires_grad_() for view in views]
    weights = torch.randn(32, 4, plan.num_queries, generator=torch.Generator().manual_seed(0)).permute(
        2, 1, 0
    )
    results = []
    for inputs in (packed, strided):
        out = run_attention(*inputs, plan, scale=0.3, backend=backend)
        results.append((out, *torch.autograd.grad(out, inputs, weights)))
    for a, b in zip(*results, strict=True):
        if backend == "cpu":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_keys_outside_every_run_neither_leak_nor_are_written(backend):
    # Case: NaN rows past the end, zero-length and one-token sequences.
    plan = AttentionPlan.build(
        [(2, 3, 1, 0, []), (5, 0, 5, 0, []), (5, 1, 6, 0, [(1, 3)]), (6, 1, 8, 3, [(1, 3)])],
        num_queries=10,
        num_keys=20,
    )
    clean = tensors(2, plan, (4, 2), 32)
    used_queries, used_keys = [2, 3, 4, 5, 6], [1, 2, 3, 6, 8, 9, 10, 11]
    poisoned = [torch.full_like(tensor, math.nan) for tensor in clean]
    for tensor, source, used in zip(poisoned, clean, (used_queries, used_keys, used_keys), strict=True):
        tensor[used] = source[used]
    weights = torch.full_like(clean[0], math.nan)
    weights[used_queries] = 1.0
    results = []
    for inputs in (clean, poisoned):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = run_attention(*leaves, plan, scale=0.3, backend=backend)
        results.append((out, *torch.autograd.grad(out, leaves, torch.nan_to_num(weights))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(b).all()
    unused = [i for i in range(10) if i not in used_queries]
    assert torch.equal(results[1][0][unused], torch.zeros(5, 4, 32))
    assert torch.equal(results[1][1][unused], torch.zeros(5, 4, 32))
    if backend == "cpu":  # an undefined gradient of an unwritten row stays out
        leaves = [tensor.clone().requires_grad_() for tensor in poisoned]
        grads = torch.autograd.grad(run_attention(*leaves, plan, scale=0.3, backend="cpu"), leaves, weights)
        assert all(torch.isfinite(grad).all() for grad in grads)


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
def test_a_change_in_one_tree_leaves_the_bits_of_the_others(instruction_set, threads):
    plan = tree_plan([8, 6, 6, 70, 8, 6, 1, 8, 5], [None, 0, 0, None, None, 4, 5, None, 7])
    inputs = tensors(4, plan, (4, 2), 32)
    tree = slice(20, 90)  # the node of 70 tokens, a tree of its own

    def run(tensors):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out = run_attention(*leaves, plan, scale=0.3, backend="cpu", num_threads=threads)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    before = run(inputs)
    for tensor in inputs:
        tensor[tree] *= -3.0
    after = run(inputs)
    for a, b in zip(before, after, strict=True):
        assert not torch.equal(a[tree], b[tree])
        a[tree] = b[tree]
        assert torch.equal(a, b)


@needs_native
def test_bits_do_not_depend_on_the_number_of_threads(instruction_set):
    plan = tree_plan([130, 6, 6, 70, 8, 6, 1, 8, 5], [None, 0, 0, None, None, 4, 5, None, 7])
    results = []
    for threads in (1, 2, 3, 1):
        inputs = tensors(6, plan, (4, 2), 64, requires_grad=True)
        out = run_attention(*inputs, plan, scale=0.1, backend="cpu", num_threads=threads)
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_native
def test_shared_prefixes_give_the_gradients_of_the_unshared_computation():
    prompt, leaves = 12, [5, 1, 9]
    tree = tree_plan([prompt, *leaves], [None, 0, 0, 0])
    flat = tree_plan([prompt + n for n in leaves], [None] * 3)
    inputs = tensors(8, tree, (4, 2), 32, requires_grad=True)
    places, start = [], prompt
    for n in leaves:
        places += [*range(prompt), *range(start, start + n)]
        start += n
    weights = torch.randn(prompt + sum(leaves), 4, 32, generator=torch.Generator().manual_seed(1))
    out = run_attention(*inputs, tree, scale=0.3, backend="cpu")
    copies = [tensor[places] for tensor in inputs]
    unshared = run_attention(*copies, flat, scale=0.3, backend="cpu")
    torch.testing.assert_close(out[places], unshared, rtol=1e-5, atol=1e-6)
    share = torch.ones(len(places), 1, 1)
    share[[i for i, place in enumerate(places) if place < prompt]] = 1 / 3  # copies share the prompt's weight
    grads = torch.autograd.grad(out, inputs, weights)
    wanted = torch.autograd.grad(unshared, inputs, weights[places] * share)
    assert max(relative(a, b) for a, b in zip(grads, wanted, strict=True)) <= 1e-6


@needs_native
def test_large_scores_neither_overflow_nor_vanish():
    plan = tree_plan([40, 3], [None, 0])
    query, key, value = tensors(9, plan, (4, 2), 32)
    query, key = query * 60, key * 60
    out = run_attention(query, key, value, plan, scale=1.0, backend="cpu")
    assert torch.isfinite(out).all()
    assert torch.equal(out[0], value[0].repeat_interleave(2, dim=0))  # one visible key: its value, exactly


@needs_native
def test_a_nan_in_a_visible_key_shows_in_the_output():
    plan = tree_plan([5, 1], [None, 0])
    query, key, value = tensors(9, plan, (2, 2), 32)
    key[5, 0, 0] = math.nan
    out = run_attention(query, key, value, plan, scale=1.0, backend="cpu")
    assert torch.isnan(out[5, 0]).all()
    assert torch.isfinite(out[5, 1]).all()
    assert torch.isfinite(out[:5]).all()


def test_auto_takes_the_native_library_and_the_reference_for_other_dtypes():
    plan = tree_plan([5, 1], [None, 0])
    inputs = tensors(0, plan, (2, 1), 8)
    auto = run_attention(*inputs, plan, scale=0.3)
    assert torch.equal(auto, run_attention(*inputs, plan, scale=0.3, backend=BACKENDS[0]))
    double = [tensor.double() for tensor in inputs]
    assert run_attention(*double, plan, scale=0.3).dtype == torch.float64


def test_a_backend_that_cannot_serve_is_refused():
    plan = tree_plan([5], [None])
    double = tensors(0, plan, (2, 1), 8, dtype=torch.float64)
    with pytest.raises(UnsupportedOption, match="float32"):
        run_attention(*double, plan, scale=0.3, backend="cpu")
    with pytest.raises(UnsupportedOption, match="'gpu'"):
        run_attention(*double, plan, scale=0.3, backend="gpu")


def test_without_the_library_cpu_is_unavailable_and_auto_falls_back(monkeypatch):
    plan = tree_plan([5], [None])
    inputs = tensors(0, plan, (2, 1), 8)
    monkeypatch.setattr(native, "_load", lambda: (None, "a test took it away"))
    with pytest.raises(BackendUnavailable, match="a test took it away"):
        run_attention(*inputs, plan, scale=0.3, backend="cpu")
    reference = run_attention(*inputs, plan, scale=0.3, backend="reference")
    assert torch.equal(run_attention(*inputs, plan, scale=0.3), reference)


GOOD = {
    "query_start": [0, 2],
    "query_len": [2, 1],
    "causal_start": [4, 6],
    "causal_base": [0, 1],
    "range_offsets": [0, 1, 3],
    "range_start": [0, 0, 2],
    "range_len": [2, 2, 2],
}
BIG = 2**63 - 1


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("query_start", [0, 3], r"query_len\[1\] is 1, expected 0 .. 0"),
        ("query_start", [0, 1], "query 1 belongs to two runs"),
        ("query_start", [-1, 2], r"query_start\[0\] is -1"),
        ("query_len", [2, BIG], r"query_len\[1\]"),
        ("query_len", [2, -1], r"query_len\[1\] is -1"),
        ("query_len", [2], "query_len has 1 elements, expected 2"),
        ("causal_start", [4, BIG], r"causal_start\[1\]"),
        ("causal_start", [4, 7], r"causal_base\[1\] is 1, expected 0 .. 0"),
        ("causal_start", [4, 8], r"query_len\[1\] is 1, expected 0 .. 0"),
        ("causal_start", [1, 6], "full range 0 of run 0 overlaps"),
        ("causal_base", [0, BIG], r"causal_base\[1\]"),
        ("causal_base", [-1, 1], r"causal_base\[0\] is -1"),
        ("range_offsets", [0, 2, 1], "range_offsets must rise from 0 to 3"),
        ("range_offsets", [0, 1, 4], "range_offsets must rise from 0 to 3"),
        ("range_offsets", [0, 3], "range_offsets has 2 elements, expected 3"),
        ("range_start", [0, 0, BIG], r"range_start\[2\]"),
        ("range_start", [0, 0, 1], "two full ranges of run 1 overlap"),
        ("range_len", [2, 2, BIG], r"range_len\[2\]"),
        ("range_len", [2, 2], "range_start has 3 elements, range_len 2"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_when_it_is_made(name, values, message):
    arrays = {key: torch.tensor(array) for key, array in GOOD.items()}
    AttentionPlan(**arrays, num_queries=3, num_keys=8)
    arrays[name] = torch.tensor(values)
    with pytest.raises(ShapeError, match=message):
        AttentionPlan(**arrays, num_queries=3, num_keys=8)


def test_a_plan_refuses_other_dtypes_and_strides():
    arrays = {key: torch.tensor(array) for key, array in GOOD.items()}
    with pytest.raises(ShapeError, match="int64"):
        AttentionPlan(**(arrays | {"query_len": torch.tensor([2.0, 1.0])}), num_queries=3, num_keys=8)
    with pytest.raises(ShapeError, match="contiguous"):
        AttentionPlan(**(arrays | {"query_len": torch.tensor([2, 0, 1, 0])[::2]}), num_queries=3, num_keys=8)
    with pytest.raises(ShapeError, match="negative"):
        AttentionPlan(**arrays, num_queries=-1, num_keys=8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_do_not_fit_are_refused_before_any_native_call(backend):
    plan = tree_plan([5, 1], [None, 0])
    query, key, value = tensors(0, plan, (4, 2), 8)
    cases = [
        ((query[:5], key, value), "5 queries and 6 keys"),
        ((query, key[:4], value[:4]), "6 queries and 4 keys"),
        ((query, key, value[:, :1]), "expected"),
        ((query[:, :3], key, value), "3 query heads"),
        ((query[..., :4].contiguous(), key, value), "dimension 4"),
        ((query, key.double(), value), "one dtype"),
        ((query.mT.contiguous().mT, key, value), "contiguous"),
    ]
    for inputs, message in cases:
        with pytest.raises(ShapeError, match=message):
            run_attention(*inputs, plan, scale=1.0, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_plans_give_zeros(backend):
    plan = AttentionPlan.build([], num_queries=3, num_keys=0)
    inputs = tensors(0, plan, (2, 1), 8, requires_grad=True)
    out = run_attention(*inputs, plan, scale=1.0, backend=backend)
    assert torch.equal(out, torch.zeros(3, 2, 8))
    (grad,) = torch.autograd.grad(out.sum(), inputs[0])
    assert torch.equal(grad, torch.zeros(3, 2, 8))
