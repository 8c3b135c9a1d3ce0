"""The head of the native library: on every instruction set, against fp64, whatever the batch, the chunk, the threads.

Legend: T rows, V vocabulary, H hidden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway_kernels import native
from headway_kernels.errors import NumericsError, UnsupportedOption
from headway_kernels.head import HeadLogp, HeadLoss, head_logp, head_loss_step
from headway_kernels.head_native import supports_head
from headway_kernels.head_shard import VocabShard
from headway_kernels.objective import Objective

pytestmark = pytest.mark.skipif(not native.available(), reason="no native library was built")


@pytest.fixture(params=native.instruction_sets() or ["portable"])
def isa(request):
    """Each instruction set in turn."""
    native.force_instruction_set(request.param)
    yield request.param
    native.force_instruction_set(None)


def problem(T: int, V: int, H: int, dtype: torch.dtype = torch.float32, spread: float = 1.0):
    generator = torch.Generator().manual_seed(T * 1_000_003 + V * 101 + H)
    x = (torch.randn(T, H, generator=generator) * spread).to(dtype)
    weight = (torch.randn(V, H, generator=generator) * H**-0.5).to(dtype)
    target = torch.randint(0, V, (T,), generator=generator)
    target[0], target[-1] = V - 1, 0
    return x, weight, target, torch.rand(T, generator=generator) * 1.5 + 0.5


def logits_in_fp64(x: Tensor, weight: Tensor, inverse: Tensor, bias=None, softcap=None, scale=None) -> Tensor:
    z = x.double() @ weight.double().T
    if bias is not None:
        z = z + bias.double()
    z = z * (scale or 1.0)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    return z * inverse.double()[:, None]


def scores_in_fp64(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logp = torch.log_softmax(z, 1)
    entropy = -torch.where(logp.exp() > 0, logp.exp() * logp, 0.0).sum(1)
    return logp.gather(1, target[:, None])[:, 0], torch.logsumexp(z, 1), entropy


def assert_scores(got: HeadLogp, z: Tensor, target: Tensor) -> None:
    bound = 1e-5 * max(1.0, float(z.abs().max()))
    for name, ours, exact in zip(HeadLogp._fields, got, scores_in_fp64(z, target), strict=True):
        assert float((ours.double() - exact).abs().max()) <= bound, name


# V: below, at and beyond a vector, a panel of columns and a tile of 256; many tiles; real vocabularies.
# T: one row, part of a register tile of 4, 6 or 14 rows, several. H: a vector, a remainder, several vectors.
SIZES = (
    (1, 3, 8), (7, 17, 65), (127, 1, 64), (128, 17, 8), (129, 129, 65), (255, 3, 256), (257, 17, 64),
    (1023, 129, 8), (1025, 3, 65), (32000, 17, 8), (50257, 3, 64), (65537, 1, 8), (129920, 3, 8), (151936, 3, 8),
    (300, 5, 4096),
)  # fmt: skip


@pytest.mark.parametrize(("V", "T", "H"), SIZES)
def test_scores_are_those_of_fp64_at_every_size(isa, V, T, H):
    x, weight, target, inverse = problem(T, V, H, spread=3.0)
    got = head_logp(x, weight, target, inv_temperature=inverse, backend="cpu")
    assert_scores(got, logits_in_fp64(x, weight, inverse), target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_upcast_not_rounded(isa, dtype):
    x, weight, target, inverse = problem(9, 777, 48, dtype, spread=5.0)
    got = head_logp(x, weight, target, inv_temperature=inverse, backend="cpu")
    assert_scores(got, logits_in_fp64(x, weight, inverse), target)


@pytest.mark.parametrize(
    "options", [{"bias": True}, {"softcap": 0.7}, {"softcap": 50.0}, {"scale": 0.1}, "all"], ids=str
)
def test_the_chain_is_that_of_fp64(isa, options):
    chosen = {"bias": True, "softcap": 3.0, "scale": 1.7} if options == "all" else dict(options)
    x, weight, target, inverse = problem(19, 530, 33, spread=4.0)
    bias = torch.randn(530, generator=torch.Generator().manual_seed(3)) if chosen.pop("bias", False) else None
    z = logits_in_fp64(x, weight, inverse, bias, **chosen)
    softcap, scale = chosen.get("softcap"), chosen.get("scale")
    got = head_logp(
        x,
        weight,
        target,
        inv_temperature=inverse,
        bias=bias,
        softcap=softcap,
        logit_scale=scale,
        backend="cpu",
    )
    assert_scores(got, z, target)


@pytest.mark.parametrize("peak", [20.0, 80.0, 600.0, 3000.0])
def test_peaked_logits_stay_exact(isa, peak):
    x, weight, target, _ = problem(6, 400, 16)
    weight[123] = 0.0
    weight[123, 0] = peak
    x[:, 0] = 1.0
    target[:] = torch.tensor([123, 5, 123, 7, 399, 123])
    got = head_logp(x, weight, target, inv_temperature=torch.ones(6), backend="cpu")
    assert_scores(got, logits_in_fp64(x, weight, torch.ones(6)), target)


def test_columns_that_are_minus_infinity_have_no_mass(isa):
    """Whole tiles of them, the first among them, and a target among them."""
    x, weight, target, inverse = problem(5, 1000, 16)
    bias = torch.full((1000,), -torch.inf)
    bias[700:720] = 0.0
    target[:] = torch.tensor([700, 719, 705, 3, 710])
    got = head_logp(x, weight, target, inv_temperature=inverse, bias=bias, backend="cpu")
    z = logits_in_fp64(x, weight, inverse, bias)
    kept = z[:, 700:720]
    torch.testing.assert_close(got.logsumexp.double(), kept.logsumexp(1), rtol=1e-6, atol=1e-5)
    assert float(got.logp[3]) == -torch.inf
    inside = [0, 1, 2, 4]
    exact = torch.log_softmax(kept, 1)[inside, target[inside] - 700]
    torch.testing.assert_close(got.logp[inside].double(), exact, rtol=1e-6, atol=1e-5)
    assert torch.isfinite(got.entropy).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_logit_spoils_its_row_and_no_other(isa, bad):
    x, weight, target, inverse = problem(20, 600, 24)
    clean = head_logp(x, weight, target, inv_temperature=inverse, backend="cpu")
    x[7, 3] = bad
    got = head_logp(x, weight, target, inv_temperature=inverse, backend="cpu")
    rest = torch.arange(20) != 7
    for ours, before in zip(got, clean, strict=True):
        assert torch.isnan(ours[7])
        assert torch.equal(ours[rest], before[rest])


def test_a_rows_scores_are_bit_identical_alone_and_in_any_batch(isa):
    for V, H in ((33, 8), (1500, 70), (5000, 600)):
        x, weight, target, inverse = problem(61, V, H)
        whole = head_logp(x, weight, target, inv_temperature=inverse, backend="cpu")
        for low, high in ((0, 1), (60, 61), (13, 14), (3, 17), (1, 61), (20, 48)):
            part = head_logp(
                x[low:high], weight, target[low:high], inv_temperature=inverse[low:high], backend="cpu"
            )
            for ours, expected in zip(part, whole, strict=True):
                assert torch.equal(ours, expected[low:high])


def test_a_group_of_rows_beyond_what_is_packed_at_once_changes_no_bit():
    x, weight, target, inverse = problem(3100, 40, 8)
    whole = head_logp(x, weight, target, inv_temperature=inverse, backend="cpu")
    part = head_logp(
        x[1500:1600], weight, target[1500:1600], inv_temperature=inverse[1500:1600], backend="cpu"
    )
    for ours, expected in zip(part, whole, strict=True):
        assert torch.equal(ours, expected[1500:1600])


def step(x, weight, target, inverse, objective=None, **options) -> tuple[HeadLoss, Tensor]:
    T = x.shape[0]
    weight_grad = torch.zeros(weight.shape)
    generator = torch.Generator().manual_seed(1)
    # Its own log-probs, so that the ratio is exactly 1.
    behaviour = head_logp(x, weight, target, inv_temperature=inverse, backend=options["backend"]).logp
    out = head_loss_step(
        x, weight, target, inv_temperature=inverse, behaviour=behaviour,
        advantage=torch.randn(T, generator=generator),
        token_weight=options.pop("token_weight", torch.full((T,), 1.0 / T)), segments=None,
        objective=objective or Objective(), weight_grad=weight_grad, **options,
    )  # fmt: skip
    return out, weight_grad


def near(got: Tensor, exact: Tensor, rel: float) -> None:
    assert float((got.double() - exact).abs().max()) <= rel * max(float(exact.abs().max()), 1e-12)


@pytest.mark.parametrize(("V", "T", "H"), SIZES)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.02])
def test_gradients_are_those_of_fp64_at_every_size(isa, V, T, H, entropy_coef):
    x, weight, target, inverse = problem(T, V, H, spread=2.0)
    objective = Objective(entropy_coef=entropy_coef)
    got, weight_grad = step(x, weight, target, inverse, objective, backend="cpu")
    exact, exact_grad = autograd_in_fp64(x, weight, target, inverse, objective)
    near(got.x_grad, exact, 1e-5)
    near(weight_grad, exact_grad, 1e-5)


def autograd_in_fp64(x, weight, target, inverse, objective) -> tuple[Tensor, Tensor]:
    """Autograd of the on-policy policy-gradient loss, whose ratio is 1, in fp64."""
    leaves = x.double().requires_grad_(), weight.double().requires_grad_()
    z = logits_in_fp64(*leaves, inverse)
    logp, _, entropy = scores_in_fp64(z, target)
    advantage = torch.randn(x.shape[0], generator=torch.Generator().manual_seed(1)).double()
    loss = -(advantage * logp + objective.entropy_coef * entropy).sum() / x.shape[0]
    loss.backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    return leaves[0].grad, leaves[1].grad


def test_rows_without_a_coefficient_reach_no_gradient(isa):
    """A NaN in such a row, and rows on either side that move within the chunk's buffer."""
    T = 40
    x, weight, target, inverse = problem(T, 700, 20)
    token_weight = torch.full((T,), 1.0 / T)
    token_weight[[0, 3, 4, 5, 17, 39]] = 0.0
    live = token_weight != 0
    clean, clean_grad = step(x, weight, target, inverse, token_weight=token_weight, backend="cpu")
    assert (clean.x_grad[~live] == 0).all()
    assert (clean.x_grad[live] != 0).any(1).all()
    generator = torch.Generator().manual_seed(1)
    advantage = torch.randn(T, generator=generator)[live]
    behaviour = head_logp(x, weight, target, inv_temperature=inverse, backend="cpu").logp[live]
    only_grad = torch.zeros_like(weight)
    only = head_loss_step(
        x[live], weight, target[live], inv_temperature=inverse[live], behaviour=behaviour, advantage=advantage,
        token_weight=token_weight[live], segments=None, objective=Objective(), weight_grad=only_grad, backend="cpu",
    )  # fmt: skip
    assert torch.equal(only.x_grad, clean.x_grad[live])
    assert torch.equal(only_grad, clean_grad)


def test_threads_change_no_bit(isa):
    x, weight, target, inverse = problem(90, 2000, 200)
    threads = torch.get_num_threads()
    seen = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            scores = head_logp(x, weight, target, inv_temperature=inverse, backend="cpu")
            out, weight_grad = step(x, weight, target, inverse, backend="cpu")
            seen.append([*scores, out.x_grad, weight_grad])
    finally:
        torch.set_num_threads(threads)
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [1, 3, 50, 1000])
def test_chunks_change_the_gradients_by_rounding_only(rows):
    x, weight, target, inverse = problem(120, 500, 24)
    whole, whole_grad = step(x, weight, target, inverse, backend="cpu")
    parts, parts_grad = step(x, weight, target, inverse, backend="cpu", chunk_bytes=rows * 528 * 4)
    assert torch.equal(parts.logp, whole.logp)
    assert torch.equal(parts.x_grad, whole.x_grad)
    near(parts_grad, whole_grad.double(), 1e-6)


def test_gradients_of_bf16_inputs_come_from_fp32_logits(isa):
    x, weight, target, inverse = problem(33, 900, 40, torch.bfloat16, spread=3.0)
    weight_grad = torch.zeros(weight.shape)
    ones = torch.ones(33)
    behaviour = head_logp(x, weight, target, inv_temperature=inverse, backend="cpu").logp
    out = head_loss_step(
        x, weight, target, inv_temperature=inverse, behaviour=behaviour,
        advantage=ones, token_weight=ones, segments=None, objective=Objective(), weight_grad=weight_grad, backend="cpu",
    )  # fmt: skip
    leaves = x.double().requires_grad_(), weight.double().requires_grad_()
    (-scores_in_fp64(logits_in_fp64(*leaves, inverse), target)[0].sum()).backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert out.x_grad.dtype == torch.bfloat16
    near(weight_grad, leaves[1].grad, 1e-5)
    bound = 2.0**-8 * leaves[0].grad.abs().amax(1, keepdim=True)
    assert ((out.x_grad.double() - leaves[0].grad).abs() <= bound).all()


def test_the_gradient_is_added_to_what_is_there():
    x, weight, target, inverse = problem(12, 100, 8)
    _, once = step(x, weight, target, inverse, backend="cpu")
    weight_grad = torch.full_like(once, 0.5)
    behaviour = head_logp(x, weight, target, inv_temperature=inverse, backend="cpu").logp
    head_loss_step(
        x, weight, target, inv_temperature=inverse, behaviour=behaviour,
        advantage=torch.randn(12, generator=torch.Generator().manual_seed(1)), token_weight=torch.full((12,), 1 / 12),
        segments=None, objective=Objective(), weight_grad=weight_grad, backend="cpu",
    )  # fmt: skip
    torch.testing.assert_close(weight_grad, once + 0.5, rtol=1e-6, atol=1e-7)


def test_rows_of_any_stride_and_no_rows_at_all(isa):
    x, weight, target, inverse = problem(16, 90, 24)
    expected = head_logp(x, weight, target, inv_temperature=inverse, backend="cpu")
    wide = torch.zeros(16, 100)
    wide[:, :24] = x
    for same in (wide[:, :24], x.t().contiguous().t()):
        got = head_logp(same, weight, target, inv_temperature=inverse, backend="cpu")
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    none = head_logp(x[:0], weight, target[:0], inv_temperature=inverse[:0], backend="cpu")
    assert none.logp.shape == (0,)


def test_what_it_lacks_is_refused_by_name():
    x, weight, target, inverse = problem(4, 30, 8)
    with pytest.raises(UnsupportedOption, match=r"x is torch\.float64"):
        head_logp(x.double(), weight.double(), target, inv_temperature=inverse, backend="cpu")
    with pytest.raises(UnsupportedOption, match="contiguous"):
        head_logp(x, weight.t().contiguous().t(), target, inv_temperature=inverse, backend="cpu")
    reason = supports_head({"x": x, "weight": weight, "shard": VocabShard(0, 60)})
    assert reason is not None
    assert "vocabulary-parallel" in reason


def test_a_kept_buffer_is_shared_by_no_two_steps_and_given_back():
    """A larger step after a smaller one, a failed one, and two chunks at once: the gradients stay the same."""
    from headway_kernels import head_native

    head_native.release_buffers()
    small, large = problem(8, 70, 8), problem(40, 300, 8)
    first = [step(*each, backend="cpu") for each in (small, large, small)]
    assert len(head_native._spare) == 1
    held = head_native._spare[0]
    spoiled = small[0].clone()
    spoiled[3] = torch.nan
    with pytest.raises(NumericsError):
        step(spoiled, *small[1:], backend="cpu")
    again = [step(*each, backend="cpu") for each in (small, large, small)]
    for (out, weight_grad), (other, other_grad) in zip(first, again, strict=True):
        assert torch.equal(out.x_grad, other.x_grad)
        assert torch.equal(weight_grad, other_grad)
    head_native._spare[:] = [held]
    size = held.shape[0]
    assert head_native._take_buffer(size) is held
    assert head_native._take_buffer(size) is not held
    head_native.release_buffers()
    assert head_native._spare == []
