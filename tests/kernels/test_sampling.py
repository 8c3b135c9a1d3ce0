"""sampling: log-probs against float64, draws against the distribution, Philox against published vectors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_kernels import native
from headway_kernels.errors import BackendUnavailable, ShapeError, UnsupportedOption
from headway_kernels.sampling import sample_tokens, uniforms

BACKENDS = ["cpu", "reference"] if native.available() else ["reference"]
# 1; around a vector; around a block of 256; 1,024 blocks and one more (then a span is two blocks).
VOCABULARIES = [1, 2, 7, 8, 15, 16, 17, 33, 255, 256, 257, 1025, 32000, 262144, 262145]
needs_native = pytest.mark.skipif(not native.available(), reason="no native library was built")


def rows(seed, num_rows, vocab_size, spread=4.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def ones(num_rows, value=1.0):
    return torch.full((num_rows,), value, dtype=torch.float32)


def exact_logprobs(logits, inv_temperature):
    scale = torch.where(torch.isinf(inv_temperature), torch.ones(()), inv_temperature).double()
    return torch.log_softmax(logits.double() * scale[:, None], dim=1)


@pytest.fixture(params=native.instruction_sets() or [None])
def instruction_set(request):
    if request.param is None:
        yield None
        return
    native.force_instruction_set(request.param)
    yield request.param
    native.force_instruction_set(None)


def test_philox_gives_the_published_vectors():
    # Known answers of Random123 for philox4x32-10: counter (0,0,0,0), key (0,0) -> 6627e8d5 e169c58d ...
    first, second = 0x6627E8D5, 0xE169C58D
    expected = (((first >> 5) << 26) | (second >> 6)) / 2**53
    assert uniforms(np.array([0]), np.array([0]))[0] == expected


def test_uniforms_are_uniform_and_streams_differ():
    positions = np.arange(20_000)
    streams = [uniforms(np.full(20_000, seed), positions) for seed in (0, 1, -1, 2**40, 2**40 + 1)]
    for i, stream in enumerate(streams):
        assert stream.min() >= 0.0
        assert stream.max() < 1.0
        counts = np.bincount((stream * 50).astype(int), minlength=50)
        chi_square = float(((counts - 400.0) ** 2 / 400.0).sum())
        assert chi_square < 86.0  # 49 degrees of freedom: exceeded with probability 0.001
        for other in streams[i + 1 :]:
            assert abs(np.corrcoef(stream, other)[0, 1]) < 0.03
    assert len(np.unique(np.concatenate(streams))) > 99_990


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("inv_temperature", [1.0, 1 / 0.3, 1 / 1.3, 50.0, math.inf])
def test_logprobs_are_those_of_float64(vocab_size, inv_temperature):
    num_rows = 3 if vocab_size > 10_000 else 20
    logits, scale = rows(vocab_size, num_rows, vocab_size), ones(num_rows, inv_temperature)
    exact = exact_logprobs(logits, scale)
    for backend in BACKENDS:
        tokens, logprobs = sample_tokens(
            logits, scale, torch.arange(num_rows), torch.arange(num_rows), backend=backend
        )
        want = exact.gather(1, tokens[:, None])[:, 0]
        bound = (
            1e-6
            * logits.gather(1, tokens[:, None])[:, 0].abs().clamp(min=1.0)
            * max(1.0, inv_temperature if math.isfinite(inv_temperature) else 1.0)
        )
        assert (logprobs.double() - want).abs().le(bound).all()
        if math.isinf(inv_temperature):
            assert torch.equal(tokens, logits.argmax(dim=1))


@needs_native
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_each_instruction_set_draws_the_tokens_of_the_reference(instruction_set, vocab_size):
    num_rows = 2 if vocab_size > 10_000 else 50
    logits, scale = rows(vocab_size + 1, num_rows, vocab_size, spread=2.0), ones(num_rows, 0.8)
    seeds, positions = torch.arange(num_rows) * 7919, torch.arange(num_rows) + 5
    tokens, logprobs = sample_tokens(logits, scale, seeds, positions, backend="cpu")
    want, want_logprobs = sample_tokens(logits, scale, seeds, positions, backend="reference")
    cumulative = torch.softmax(logits.double() * 0.8, dim=1).cumsum(dim=1)
    draws = torch.from_numpy(uniforms(seeds.numpy(), positions.numpy()))
    clear = (cumulative - draws[:, None]).abs().min(dim=1).values > 1e-6
    assert clear.sum() >= num_rows * 0.9 or vocab_size > 1000
    assert torch.equal(tokens[clear], want[clear])
    near = cumulative.gather(1, tokens[:, None])[:, 0] - cumulative.gather(1, want[:, None])[:, 0]
    assert near.abs().max() < 1e-4
    torch.testing.assert_close(logprobs[tokens == want], want_logprobs[tokens == want], rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_distribution(backend, temperature):
    draws = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -math.inf, 0.5, -2.0, 1.5])
    batch = logits.expand(draws, 8)  # row stride 0
    scale, seeds = ones(draws, 1 / temperature), torch.full((draws,), 11)
    tokens, _ = sample_tokens(batch, scale, seeds, torch.arange(draws), backend=backend)
    counts = torch.bincount(tokens, minlength=8).double()
    expected = torch.softmax(logits.double() / temperature, dim=0) * draws
    assert counts[4] == 0
    seen = expected > 0
    chi_square = float(((counts - expected)[seen] ** 2 / expected[seen]).sum())
    assert chi_square < 22.5  # 6 degrees of freedom: exceeded with probability 0.001


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_depends_on_nothing_but_itself(backend):
    logits, scale = rows(3, 40, 700), torch.rand(40, generator=torch.Generator().manual_seed(0)) + 0.5
    seeds, positions = torch.arange(40) ** 3, torch.arange(40) % 5
    tokens, logprobs = sample_tokens(logits, scale, seeds, positions, backend=backend)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    shuffled = sample_tokens(logits[order], scale[order], seeds[order], positions[order], backend=backend)
    assert torch.equal(shuffled[0], tokens[order])
    assert torch.equal(shuffled[1], logprobs[order])
    for i in (0, 17):
        alone = [tensor[i : i + 1] for tensor in (logits, scale, seeds, positions)]
        token, logprob = sample_tokens(*alone, backend=backend, num_threads=1)
        assert (token[0], logprob[0]) == (tokens[i], logprobs[i])


@needs_native
def test_bits_do_not_depend_on_the_number_of_threads():
    arguments = rows(5, 30, 5000), ones(30), torch.arange(30), torch.arange(30)
    one, three = (sample_tokens(*arguments, backend="cpu", num_threads=n) for n in (1, 3))
    assert torch.equal(one[0], three[0])
    assert torch.equal(one[1], three[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab_size", [1, 2, 8, 40, 1000])
def test_rows_that_cannot_be_sampled_get_minus_one_and_nan(backend, vocab_size):
    logits = rows(0, 6, vocab_size)
    logits[1, vocab_size - 1] = math.nan
    logits[2, vocab_size // 2] = math.inf
    logits[3] = -math.inf
    logits[4, 0] = math.nan
    for inv_temperature in (1.0, math.inf):
        arguments = logits, ones(6, inv_temperature), torch.arange(6), torch.arange(6)
        tokens, logprobs = sample_tokens(*arguments, backend=backend)
        good = torch.tensor([True, False, False, False, False, True])
        assert torch.equal(tokens == -1, ~good)
        assert torch.equal(torch.isnan(logprobs), ~good)
        want = exact_logprobs(logits[good], arguments[1][good]).gather(1, tokens[good][:, None])[:, 0]
        torch.testing.assert_close(logprobs[good].double(), want, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=50, deadline=None)
@given(
    vocab_size=st.integers(1, 600),
    allowed=st.integers(1, 5),
    inv_temperature=st.sampled_from([1e-3, 0.5, 1.0, 100.0, 1e30, math.inf]),
    spread=st.sampled_from([0.0, 1.0, 30.0, 1e30]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_a_masked_token_is_never_drawn(backend, vocab_size, allowed, inv_temperature, spread, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.full((16, vocab_size), -math.inf)
    kept = torch.randperm(vocab_size, generator=generator)[:allowed]
    logits[:, kept] = torch.randn(16, len(kept), generator=generator) * spread
    arguments = logits, ones(16, inv_temperature), torch.full((16,), seed), torch.arange(16)
    tokens, logprobs = sample_tokens(*arguments, backend=backend)
    assert torch.isin(tokens, kept).all()
    assert torch.isfinite(logprobs).all() or inv_temperature * spread > 1e30
    assert (logprobs <= 1e-6).all()


@needs_native
def test_row_strides_and_offsets_are_followed():
    wide = torch.full((9, 1000), math.nan)
    logits = rows(2, 9, 300)
    wide[:, 400:700] = logits
    arguments = ones(9), torch.arange(9), torch.arange(9)
    strided = sample_tokens(wide[:, 400:700], *arguments, backend="cpu")
    packed = sample_tokens(logits, *arguments, backend="cpu")
    assert torch.equal(strided[0], packed[0])
    assert torch.equal(strided[1], packed[1])
    every_other = torch.arange(18)[::2]
    assert torch.equal(
        sample_tokens(logits, ones(9), every_other, every_other, backend="cpu")[0],
        sample_tokens(logits, ones(9), every_other.clone(), every_other.clone(), backend="cpu")[0],
    )


def test_no_rows_give_no_tokens():
    empty = torch.empty(0, dtype=torch.int64)
    for backend in BACKENDS:
        tokens, logprobs = sample_tokens(torch.empty(0, 5), torch.empty(0), empty, empty, backend=backend)
        assert tokens.shape == logprobs.shape == (0,)


def test_inputs_that_do_not_fit_are_refused(monkeypatch):
    logits, scale, integers = rows(0, 3, 5), ones(3), torch.arange(3)
    cases = [
        ((logits.double(), scale, integers, integers), "logits are torch.float64"),
        ((logits[0], scale, integers, integers), "expected float32"),
        ((logits[:, :0], scale, integers, integers), "V >= 1"),
        ((logits.mT.contiguous().mT, scale, integers, integers), "contiguous"),
        ((logits, scale[:2], integers, integers), "inv_temperature is"),
        ((logits, scale, integers.int(), integers), "seeds is torch.int32"),
        ((logits, scale, integers, integers[:1]), "positions is"),
        ((logits, ones(3, 0.0), integers, integers), r"inv_temperature\[0\] is 0.0"),
        ((logits, ones(3, math.nan), integers, integers), r"inv_temperature\[0\] is nan"),
        ((logits, ones(3, -1.0), integers, integers), r"inv_temperature\[0\] is -1.0"),
    ]
    for arguments, message in cases:
        with pytest.raises(ShapeError, match=message):
            sample_tokens(*arguments)
    with pytest.raises(UnsupportedOption, match="'gpu'"):
        sample_tokens(logits, scale, integers, integers, backend="gpu")
    monkeypatch.setattr(native, "_load", lambda: (None, "a test took it away"))
    with pytest.raises(BackendUnavailable, match="a test took it away"):
        sample_tokens(logits, scale, integers, integers, backend="cpu")
