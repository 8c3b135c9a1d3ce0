"""head_loss_step in Triton against fp64 autograd (head_oracle.py), at the sizes and values where such kernels fail.

Legend: T rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from head_oracle import HEADS, MASKS, Problem, check, make_problem, oracle_loss, oracle_rows, run
from policy_oracle import CORRECTED, OBJECTIVES, label
from torch.utils._python_dispatch import TorchDispatchMode

from headway_kernels.errors import NumericsError, UnsupportedOption
from headway_kernels.head import head_loss_step
from headway_kernels.head_shard import MergedRows, VocabShard
from headway_kernels.objective import Objective
from headway_kernels.triton import head_step
from headway_kernels.triton.head_step import triton_head_loss_step

TERMS = tuple(itertools.product(HEADS, MASKS, ("none", "k1", "k2", "k3"), (0.0, 0.05)))
ROWS = tuple(enumerate((*OBJECTIVES, *CORRECTED)))


def fp32_rows(problem: Problem) -> Problem:
    """bf16 x and weight, with fp32 for what is one number a row."""
    for name in ("behaviour", "advantage", "token_weight", "inv_temperature", "reference"):
        setattr(problem, name, getattr(problem, name).float())
    return problem


@pytest.mark.parametrize(("index", "options"), ROWS, ids=lambda v: label(v) if isinstance(v, dict) else "")
def test_every_row_of_the_table(index: int, options: dict[str, Any]) -> None:
    """A diagonal through heads, masks, KL and entropy; tests/kernels/test_parity.py has the cross product."""
    head, mask, kl, entropy_coef = TERMS[(index * 37) % len(TERMS)]
    chosen = {**options, "kl": kl, "kl_coef": 0.0 if kl == "none" else 0.1, "entropy_coef": entropy_coef}
    check(make_problem(T=9, mask=mask, head=head), chosen, 2e-5, 4, "triton")


# 1: one column; around a power of two; one past a block of 4096 columns; two blocks and a bit.
@pytest.mark.parametrize("V", [1, 7, 127, 128, 129, 257, 1025, 4097, 8200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_vocabulary_with_the_target_at_either_end(V: int, dtype: torch.dtype) -> None:
    """A3: a padded column that counted as logit 0 would dominate real logits of about -60."""
    problem = fp32_rows(make_problem(T=3, V=V, H=8, dtype=dtype))
    problem.bias = torch.full((V,), -60.0)
    problem.target[0], problem.target[1] = 0, V - 1
    logp = oracle_rows(problem)[0].detach()
    problem.behaviour = logp.float() - 0.1
    loss, (x, weight, bias) = oracle_loss(problem, Objective(), use_proximal=False)
    loss.backward()
    out, weight_grad, bias_grad = run(problem, Objective(), backend="triton")
    torch.testing.assert_close(out.logp.double(), logp, rtol=1e-5, atol=1e-5)
    assert bias_grad is not None
    unit = 2e-5 if dtype is torch.float32 else 2**-7  # 2 bf16 ulp of the largest element
    for got, want in ((out.x_grad, x.grad), (weight_grad, weight.grad), (bias_grad, bias.grad)):
        assert want is not None
        assert float((got.double() - want).abs().max()) <= unit * float(want.abs().max()) + 1e-7


@pytest.mark.parametrize(("T", "H"), [(1, 8), (1, 65), (3, 1), (17, 64), (65, 8)])
def test_any_number_of_rows_and_any_width(T: int, H: int) -> None:
    check(
        make_problem(T=T, V=33, H=H, head="all") if T > 4 else small(T, H),
        {"name": "cispo"},
        2e-5,
        8,
        "triton",
    )


def small(T: int, H: int) -> Problem:
    problem = make_problem(T=9, V=33, H=H, head="all")
    for name in (
        "x",
        "target",
        "inv_temperature",
        "behaviour",
        "advantage",
        "token_weight",
        "reference",
        "proximal",
    ):
        setattr(problem, name, getattr(problem, name)[:T])
    problem.segments = torch.tensor([0, T])
    return problem


@pytest.mark.parametrize("c", [1.0, 30.0])
@pytest.mark.parametrize("V", [4097, 4096])
def test_the_softcap_comes_before_padding(c: float, V: int) -> None:
    """A4: capped padding would have a logit of 0 among real ones near -c."""
    problem = make_problem(T=2, V=V, H=4) if V < 4 else make_problem(T=9, V=V, H=4)
    problem.bias, problem.softcap = torch.full((V,), -4 * c), c
    problem.behaviour = oracle_rows(problem)[0].detach().float()
    check(problem, {"name": "cispo"}, 2e-5, 9, "triton")


@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_gradients_do_not_depend_on_the_number_of_chunks(chunks: int) -> None:
    """A5: weights per row enter before the projection; dL/dweight accumulates in fp32."""
    problem = make_problem(T=28, V=65, H=64, mask="negative")
    check(problem, {"name": "cispo"}, 1e-5, -(-28 // chunks), "triton")


@pytest.mark.parametrize("head", ["plain", "all"])
def test_bf16_gradients_stay_within_two_units_of_each_row(head: str) -> None:
    problem = fp32_rows(make_problem(T=40, V=257, H=64, head=head, mask="negative", dtype=torch.bfloat16))
    loss, (x, weight, _) = oracle_loss(problem, Objective(entropy_coef=0.01), use_proximal=False)
    loss.backward()
    out, weight_grad, _ = run(
        problem, Objective(entropy_coef=0.01), backend="triton", chunk_bytes=257 * 4 * 9
    )
    assert out.x_grad.dtype is torch.bfloat16
    torch.testing.assert_close(out.logp.double(), oracle_rows(problem)[0].detach(), rtol=1e-5, atol=1e-5)
    for got, want in ((out.x_grad, x.grad), (weight_grad, weight.grad)):
        assert want is not None
        unit = 2**-7 * want.abs().amax(1, keepdim=True)  # 2 ulp of the row's largest element
        assert ((got.double() - want).abs() <= unit + 1e-9).all()


def test_a_confident_token_keeps_its_small_gradient() -> None:
    """A6: p(target) = 0.9995 in bf16; the gradient of the target's logit is 5e-4, not 0."""
    weight = torch.zeros(16, 4, dtype=torch.bfloat16)
    weight[3, 0] = 1.0
    x = torch.tensor([[math.log(0.9995 / 0.0005 * 15), 0, 0, 0]], dtype=torch.bfloat16)
    miss = 15 / (15 + math.exp(float(x[0, 0])))
    weight_grad, one = torch.zeros(16, 4), torch.ones(1)
    head_loss_step(
        x, weight, torch.tensor([3]), inv_temperature=one, behaviour=torch.tensor([math.log1p(-miss)]),
        advantage=-one, token_weight=one, segments=None, objective=Objective(), weight_grad=weight_grad,
        backend="triton",
    )  # fmt: skip
    assert miss == pytest.approx(5e-4, rel=0.05)
    assert float(weight_grad[3, 0]) == pytest.approx(miss * float(x[0, 0]), rel=2**-8)


@pytest.mark.parametrize(
    "options", [{"name": "cispo"}, {"name": "gspo", "entropy_coef": 0.1}, {"name": "m2po"}], ids=label
)
def test_masked_rows_and_stale_memory_reach_nothing(options: dict[str, Any]) -> None:
    """A1, A11: a NaN in a masked row, and buffers full of NaN, change no bit."""
    problem = make_problem(T=12, mask="some")
    clean, clean_grad, _ = run(problem, Objective(**options), backend="triton")
    problem.x[0], problem.behaviour[3], problem.advantage[6] = torch.nan, torch.inf, torch.nan
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        assert torch.empty(1).isnan().all()
        dirty, dirty_grad, _ = run(problem, Objective(**options), backend="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean.x_grad, dirty.x_grad)
    assert torch.equal(clean_grad, dirty_grad)
    assert torch.equal(clean.stats.sums, dirty.stats.sums)


def test_a_weighted_row_that_is_not_finite_is_counted_and_never_hidden() -> None:
    problem = make_problem(T=6)
    problem.x[2, 1] = torch.nan
    out, weight_grad, _ = run(problem, Objective(), backend="triton")
    assert math.isnan(float(out.loss))
    assert weight_grad.isnan().any()
    with pytest.raises(NumericsError, match="1 tokens"):
        out.stats.check()


def test_nothing_to_train_has_gradients_of_exactly_zero() -> None:
    problem = make_problem(T=6, head="all")
    problem.token_weight.zero_()
    for objective in (Objective(), Objective("gspo"), Objective(entropy_coef=0.1)):
        out, weight_grad, _ = run(problem, objective, backend="triton")
        assert float(out.loss) == 0.0
        assert not out.x_grad.any()
        assert not weight_grad.any()


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_columns_masked_by_a_bias_keep_the_entropy_finite(softcap: float | None) -> None:
    problem = make_problem(T=6, head="bias")
    problem.softcap = softcap
    assert problem.bias is not None
    problem.bias[5] = -torch.inf
    problem.target[problem.target == 5] = 6
    out, weight_grad, _ = run(problem, Objective(entropy_coef=0.1), backend="triton")
    assert out.entropy is not None
    assert torch.isfinite(out.entropy).all()
    assert torch.isfinite(weight_grad).all()
    assert float(weight_grad[5].abs().max()) < 1e-10  # a softcap brings -inf back to -c, where it is flat


def test_a_row_has_the_same_bits_whichever_kernel_scored_it() -> None:
    """One fused kernel, or scores and gradients apart: log-probs and fp32 gradients agree to rounding."""
    problem = make_problem(T=9, head="all")
    fused, fused_grad, _ = run(problem, Objective("m2po"), m2_limit=torch.tensor(0.1), backend="triton")
    problem_limit = Objective(
        "m2po", m2_bound=1e9
    )  # a bound that keeps every token, and needs every row first
    apart, _, _ = run(problem, problem_limit, backend="triton")
    torch.testing.assert_close(fused.logp, apart.logp, rtol=1e-6, atol=1e-6)
    everything = run(problem, Objective("m2po"), m2_limit=torch.tensor(1e9), backend="triton")
    torch.testing.assert_close(everything[0].x_grad, apart.x_grad, rtol=1e-5, atol=1e-7)
    assert not torch.equal(fused_grad, everything[1])


class NoLargeTensor(TorchDispatchMode):
    """Fails on any result of the size of `limit` fp32 values or more."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit_bytes = 4 * limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                assert tensor.numel() * tensor.element_size() < self.limit_bytes, (
                    f"{func} made {list(tensor.shape)}"
                )
        return out


@pytest.mark.parametrize("name", ["cispo", "gspo"])
def test_no_tensor_of_half_the_logits_ever_exists(name: str) -> None:
    """G1: whatever T is, a chunk of logits is all there is."""
    problem = make_problem(T=40, V=4096, H=4, mask="some")
    with NoLargeTensor(40 * 4096 // 2):
        run(problem, Objective(name), chunk_bytes=7 * 4096 * 4, backend="triton")


class _Recorder(VocabShard):
    """A rank that notes what it would send, and goes on with its own values."""

    def merge(self, peak: Any, sums: Any, dots: Any, picked: Any) -> MergedRows:
        SENT.setdefault(self.start, []).append((peak.clone(), sums.clone(), dots.clone(), picked.clone()))
        return MergedRows(peak, sums, dots, torch.where(torch.isfinite(picked), picked, peak))

    def sum_over_ranks(self, x_grad: torch.Tensor) -> None:
        del x_grad

    def smallest(self, count: int, device: torch.device) -> int:
        del device
        return min(count, 4)


class _Player(_Recorder):
    """A rank that receives what all ranks have sent."""

    def merge(self, peak: Any, sums: Any, dots: Any, picked: Any) -> MergedRows:
        place = PLACE[self.start]
        PLACE[self.start] += 1
        parts = [sent[place] for sent in SENT.values()]
        highest = torch.stack([part[0] for part in parts]).amax(0)
        total, dot = torch.zeros_like(sums), torch.zeros_like(sums)
        for part_peak, part_sums, part_dots, _ in parts:
            shift = (part_peak - highest).double()
            total += part_sums * shift.exp()
            dot += (part_dots + shift * part_sums) * shift.exp()
        return MergedRows(highest, total, dot, torch.stack([part[3] for part in parts]).amax(0))


SENT: dict[int, list[Any]] = {}
PLACE: dict[int, int] = {}


@pytest.mark.parametrize("name", ["cispo", "gspo"])
def test_the_parts_of_a_split_vocabulary_make_the_whole(name: str) -> None:
    """Two ranks, one after the other: what each sends is recorded, then played to both."""
    problem, objective = make_problem(T=9, V=33, head="all"), Objective(name, entropy_coef=0.05)
    problem.target[0], problem.target[1], problem.target[2] = 0, 32, 20
    whole, whole_grad, _ = run(problem, objective, backend="triton", chunk_bytes=4 * 48 * 4)
    SENT.clear()
    PLACE.update({0: 0, 20: 0})
    x_grads, weight_grads = [], []
    for kind in (_Recorder, _Player):
        x_grads, weight_grads = [], []
        for low, high in ((0, 20), (20, 33)):
            grad = torch.zeros(high - low, 8)
            assert problem.bias is not None
            out = triton_head_loss_step(
                problem.x, problem.weight[low:high], problem.target, inv_temperature=problem.inv_temperature,
                behaviour=problem.behaviour, advantage=problem.advantage, token_weight=problem.token_weight,
                segments=problem.segments, objective=objective, reference=None, proximal=None, m2_limit=None,
                bias=problem.bias[low:high], softcap=problem.softcap, logit_scale=problem.logit_scale,
                shard=kind(low, 33), weight_grad=grad, bias_grad=None, chunk_bytes=4 * 48 * 4, want_entropy=True,
            )  # fmt: skip
            x_grads.append(out.x_grad)
            weight_grads.append(grad)
    torch.testing.assert_close(out.logp, whole.logp, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x_grads[0] + x_grads[1], whole.x_grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.cat(weight_grads), whole_grad, rtol=1e-4, atol=1e-6)


def test_rows_may_lie_beyond_2_to_the_31_elements() -> None:
    """Offsets are int64: two rows of logits 2^31 + 64 elements apart; the pages between are never touched."""
    from headway_kernels.triton.head_rows import score_rows

    stride, V = 2**31 + 64, 50
    logits = torch.empty(stride + V).as_strided((2, V), (stride, 1))
    logits[0], logits[1] = torch.arange(V) * 0.01, torch.arange(V) * -0.1
    parts, target = torch.zeros(2, 4), torch.tensor([3, 4])
    score_rows[(2,)](
        logits, stride, V, None, target, torch.ones(2), 1.0, 1.0, 0, parts, HAS_SOFTCAP=False, BLOCK=64
    )
    others = [torch.cat((row[:t], row[t + 1 :])) for row, t in zip(logits, target.tolist(), strict=True)]
    for row in range(2):
        assert float(parts[row, 0]) == float(logits[row].max())
        want = (others[row] - logits[row].max()).exp().sum()
        torch.testing.assert_close(parts[row, 1], want, rtol=1e-6, atol=0)
        assert float(parts[row, 3]) == float(logits[row, target[row]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_dtypes_that_the_kernels_lack_are_refused(dtype: torch.dtype) -> None:
    problem = make_problem(T=6)
    problem.x, problem.weight = problem.x.to(dtype), problem.weight.to(dtype)
    with pytest.raises(UnsupportedOption, match="it takes"):
        run(problem, Objective(), backend="triton")


def test_two_calls_agree_bit_for_bit() -> None:
    problem = make_problem(T=9, mask="some", head="all")
    first, second = (run(problem, Objective("gspo"), backend="triton") for _ in "ab")
    assert torch.equal(first[0].x_grad, second[0].x_grad)
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[0].stats.sums, second[0].stats.sums)


def test_the_step_compiles_no_option_away() -> None:
    """B7: every argument of the public function reaches the kernels: changing it changes the result."""
    problem = make_problem(T=9, head="all")
    base = run(
        problem, Objective("decoupled_ppo", correction="tis"), backend="triton", proximal=problem.proximal
    )
    for changes in (
        {"softcap": None},
        {"logit_scale": 0.9},
        {"bias": None, "bias_grad": None},
        {"proximal": None},
    ):
        options = {"proximal": problem.proximal, **changes}
        options.pop("bias_grad", None)
        if "bias" in changes:
            problem.bias = None
            options.pop("bias")
        changed = run(problem, Objective("decoupled_ppo", correction="tis"), backend="triton", **options)
        assert not torch.equal(base[0].x_grad, changed[0].x_grad), changes
    assert head_step.ALIGNMENT * 4 % 64 == 0
