"""What the head's numbers must stand, on each back-end that runs on the CPU: peaks, padding, chunks, bf16, bad rows.

Legend: T rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from typing import Any

import pytest
import torch
from head_oracle import (
    HEADS,
    MASKS,
    Problem,
    assert_near,
    check,
    make_problem,
    oracle_loss,
    oracle_rows,
    run,
)
from policy_oracle import CORRECTED, OBJECTIVES
from torch import Tensor

from headway_kernels import registry
from headway_kernels.head import HeadLogp, head_logp, head_loss_step
from headway_kernels.objective import Objective

BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=f"{name}: {missing}"))
    for name, missing in registry.available("head_loss_step").items()
    if name in ("cpu", "reference")
]
pytestmark = pytest.mark.parametrize("backend", BACKENDS)
ROWS = (*OBJECTIVES, *CORRECTED)


def scores(problem: Problem, backend: str) -> HeadLogp:
    return head_logp(
        problem.x, problem.weight, problem.target, inv_temperature=problem.inv_temperature, backend=backend,
        **problem.head(),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("peak", [1.0, 30.0, 300.0])
def test_scores_are_exact_to_fp32_however_peaked(backend: str, dtype: torch.dtype, peak: float) -> None:
    """Within 1e-5 max(1, |z|max) of fp64 over the same inputs, entropy too."""
    problem = make_problem(T=17, V=1025, H=64, head="mixed")
    problem.x = (problem.x * peak / 8).to(dtype)
    problem.weight = problem.weight.to(dtype)
    logits = problem.x.double() @ problem.weight.double().T * problem.inv_temperature.double()[:, None]
    problem.target[::2] = logits.argmax(1)[::2]
    logp, entropy = (tensor.detach() for tensor in oracle_rows(problem))
    bound = 1e-5 * max(1.0, float(logits.abs().max()))
    out = scores(problem, backend)
    assert float((out.logp.double() - logp).abs().max()) <= bound
    assert float((out.entropy.double() - entropy).abs().max()) <= bound
    assert float((out.logsumexp.double() - torch.logsumexp(logits, 1)).abs().max()) <= bound


# Two padded sizes, a real one, and a power of two, where nothing is padded.
@pytest.mark.parametrize("V", [32000, 65537, 256000, 65536])
@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap_leaves_no_mass_outside_the_vocabulary(backend: str, V: int, softcap: float) -> None:
    """All real logits are near -c; a padded one that was capped would be 0 and take all the mass."""
    problem = make_problem(T=3, V=V)
    problem.softcap = softcap
    problem.bias = torch.full((V,), -200.0)
    problem.behaviour = oracle_rows(problem)[0].detach().float()
    check(problem, {"name": "grpo"}, 1e-5, 2, backend)


@pytest.mark.parametrize("mask", MASKS)
def test_token_weights_enter_before_the_projection_whatever_the_chunk_count(backend: str, mask: str) -> None:
    """Weights of 0 first and negative ones among them; 1, 2, 7 and 64 chunks agree to fp32 rounding."""
    problem = make_problem(T=64, V=257, H=16, mask=mask)
    gradients = []
    for chunks in (1, 2, 7, 64):
        check(problem, {"name": "cispo"}, 1e-5, -(-64 // chunks), backend)
        out, weight_grad, _ = run(
            problem, Objective(), chunk_bytes=-(-64 // chunks) * 300 * 4, backend=backend
        )
        gradients.append((out.x_grad, weight_grad))
    for x_grad, weight_grad in gradients[1:]:
        assert_near(x_grad, gradients[0][0].double(), 1e-5)
        assert_near(weight_grad, gradients[0][1].double(), 1e-5)


def bf16_units(got: Tensor, exact: Tensor) -> float:
    """The largest difference, in bf16 units in the last place of its row's largest element."""
    largest = exact.abs().amax(1, keepdim=True).clamp(min=1e-30)
    unit = torch.exp2(torch.floor(torch.log2(largest)) - 7)
    return float(((got.double() - exact).abs() / unit).max())


def check_bf16(options: dict[str, Any], index: int, backend: str) -> None:
    """One objective in bf16, its mask, head, KL, entropy and chunks by the index."""
    fields = dict(options)
    use_proximal = fields.pop("proximal", False)
    kl = ("none", "k1", "k2", "k3")[index % 4]
    objective = Objective(
        **fields, kl=kl, kl_coef=0.0 if kl == "none" else 0.1, entropy_coef=0.05 * (index % 2)
    )
    head, mask = list(HEADS)[index % len(HEADS)], MASKS[index % len(MASKS)]
    problem = make_problem(T=33, V=65, H=16, head=head, mask=mask, dtype=torch.bfloat16)
    loss, (x, weight, bias) = oracle_loss(problem, objective, use_proximal)
    loss.backward()
    extra: dict[str, Any] = {"proximal": problem.proximal} if use_proximal else {}
    if objective.kl != "none":
        extra["reference"] = problem.reference
    out, weight_grad, bias_grad = run(
        problem, objective, chunk_bytes=(3, 7, 100)[index % 3] * 65 * 4, backend=backend, **extra
    )
    assert out.x_grad.dtype is torch.bfloat16
    assert x.grad is not None
    assert float(out.loss) == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-5)
    assert bf16_units(out.x_grad, x.grad) <= 2
    assert_near(weight_grad, weight.grad, 1e-5)
    if bias_grad is not None:
        assert_near(bias_grad, bias.grad, 1e-5)
    logp, entropy = (tensor.detach() for tensor in oracle_rows(problem))
    torch.testing.assert_close(out.logp.double(), logp, rtol=1e-5, atol=1e-5)
    assert out.entropy is not None
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", range(4))
def test_bf16_inputs_accumulate_in_fp32_for_every_row_of_the_table(backend: str, part: int) -> None:
    """dL/dx within two bf16 units of its row's largest element, dL/dweight and scores at fp32's accuracy."""
    for index in range(part, len(ROWS), 4):
        check_bf16(ROWS[index], index // 4, backend)


def test_a_confident_token_keeps_its_small_gradient(backend: str) -> None:
    """p(target) = 0.9995 in bf16; the gradient of the target's logit is 5e-4, not 0."""
    weight = torch.zeros(16, 4, dtype=torch.bfloat16)
    weight[3, 0] = 1.0
    gap = math.log(0.9995 / 0.0005 * 15)
    x = torch.tensor([[gap, 0, 0, 0]], dtype=torch.bfloat16)
    miss = 15 / (15 + math.exp(float(x[0, 0])))
    weight_grad, one = torch.zeros(16, 4), torch.ones(1)
    out = head_loss_step(
        x, weight, torch.tensor([3]), inv_temperature=one, behaviour=torch.tensor([math.log1p(-miss)]),
        advantage=-one, token_weight=one, segments=None, objective=Objective(), weight_grad=weight_grad,
        backend=backend,
    )  # fmt: skip
    assert miss == pytest.approx(5e-4, rel=0.05)
    assert float(weight_grad[3, 0]) == pytest.approx(miss * float(x[0, 0]), rel=1e-5)
    assert float(out.x_grad[0, 0]) == pytest.approx(miss, rel=2**-8)


def test_extreme_ratios_and_masked_tokens_stay_finite(backend: str) -> None:
    """Masked tokens contribute exactly 0; the log-ratio that is reported is not the bounded one."""
    problem = make_problem(T=5)
    logp = oracle_rows(problem)[0].detach().float()
    problem.behaviour = logp + torch.tensor([-89.0, -89.0, -89.0, 89.0, 0.0])
    problem.advantage = torch.tensor([1.0, 0.0, 1.0, -1.0, 1.0])
    problem.token_weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    for options in (*OBJECTIVES, *CORRECTED[::5]):
        objective = Objective(**{k: v for k, v in options.items() if k != "proximal"})
        out, weight_grad, _ = run(problem, objective, backend=backend)
        assert math.isfinite(float(out.loss))
        assert torch.isfinite(out.x_grad).all()
        assert torch.isfinite(weight_grad).all()
        assert (out.x_grad[2] == 0).all()
        assert out.stats.log_ratio_max == pytest.approx(89.0, rel=1e-5)


def test_a_masked_row_that_is_not_finite_reaches_nothing(backend: str) -> None:
    """Not even where its memory was never written: padding rows may hold anything."""
    for head in ("plain", "all"):
        problem = make_problem(mask="some", head=head)
        clean, clean_grad, _ = run(problem, Objective(), backend=backend)
        problem.x[0], problem.behaviour[3], problem.advantage[6] = torch.nan, torch.inf, torch.nan
        problem.x[9] = torch.inf
        dirty, dirty_grad, _ = run(problem, Objective(), backend=backend)
        assert torch.equal(clean.loss, dirty.loss)
        assert torch.equal(clean.x_grad, dirty.x_grad)
        assert torch.equal(clean_grad, dirty_grad)
        assert dirty.stats.entropy == clean.stats.entropy


def test_nothing_to_train_has_no_loss_and_gradients_of_exactly_zero(backend: str) -> None:
    for head in ("plain", "all"):
        problem = make_problem(head=head)
        problem.token_weight.zero_()
        problem.x[4] = torch.nan
        for objective in (Objective(), Objective("gspo"), Objective(entropy_coef=0.1)):
            out, weight_grad, _ = run(problem, objective, backend=backend)
            assert float(out.loss) == 0.0
            assert not out.x_grad.any()
            assert not weight_grad.any()
            assert (out.stats.num_tokens, out.stats.masked_share) == (0, 1.0)


def rows_of(problem: Problem, span: slice) -> Problem:
    changes = {
        name: getattr(problem, name)[span]
        for name in ("x", "target", "inv_temperature", "behaviour", "advantage", "token_weight")
    }
    return dataclasses.replace(problem, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_alone_and_in_any_batch(backend: str, dtype: torch.dtype) -> None:
    """Scores and dL/dx: bit for bit where the back-end owns its product, within 1e-6 where it is a vendor's."""
    problem = make_problem(T=61, V=1025, H=65, head="all", dtype=dtype)
    objective = Objective(entropy_coef=0.01)
    whole, _, _ = run(problem, objective, backend=backend)
    for low, high in ((0, 1), (60, 61), (13, 14), (3, 17), (1, 61), (20, 48)):
        part, _, _ = run(rows_of(problem, slice(low, high)), objective, backend=backend)
        assert part.entropy is not None
        assert whole.entropy is not None
        pairs = (
            (part.logp, whole.logp), (part.entropy, whole.entropy), (part.x_grad.float(), whole.x_grad.float()),
        )  # fmt: skip
        for got, want in pairs:
            if backend == "cpu":
                assert torch.equal(got, want[low:high])
            else:
                scale = max(1.0, float(want.abs().max()))
                # A sum that differs in its last fp32 digit may round to the next bf16.
                unit = 2**-7 if dtype is torch.bfloat16 and got is pairs[2][0] else 1e-6
                assert float((got - want[low:high]).abs().max()) <= unit * scale


def test_no_copy_of_a_head_outlives_a_change_of_its_weights(backend: str) -> None:
    """A, B, A in the same memory: each gives the bits of a head that never held the other."""
    for dtype in (torch.float32, torch.bfloat16):
        problem = make_problem(T=9, V=129, H=24, head="bias", dtype=dtype)
        assert problem.bias is not None
        versions = [
            (problem.weight.clone() * factor, problem.bias.clone() + factor) for factor in (1.0, -0.7)
        ]
        for number in (0, 1, 0, 0, 1):
            weight, bias = versions[number]
            problem.weight.copy_(weight)
            problem.bias.copy_(bias)
            here = (*scores(problem, backend), run(problem, Objective(), backend=backend)[1])
            fresh = dataclasses.replace(problem, weight=weight.clone(), bias=bias.clone())
            there = (*scores(fresh, backend), run(fresh, Objective(), backend=backend)[1])
            for mine, theirs in zip(here, there, strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.slow  # the kernel of the system maps half a million pages of zeros
def test_a_column_beyond_2_to_the_31_elements_of_the_weight_is_found(backend: str) -> None:
    """V x H = 2^31 + 2^20 fp32 elements of memory that is never written but for its ends, so it costs no pages."""
    V, H = (1 << 21) + (1 << 10), 1 << 10
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, 4 * V * H, flags=flags)
    weight = torch.frombuffer(memory, dtype=torch.float32).view(V, H)
    x, target = torch.ones(2, H), torch.tensor([V - 1, V - 2])
    weight[V - 1, :8], weight[0, :8] = 2.0, 1.0  # logits of 16 and 8 among zeros
    total = math.exp(16) + math.exp(8) + V - 2
    out = head_logp(x, weight, target, inv_temperature=torch.ones(2), backend=backend)
    assert out.logp.tolist() == pytest.approx([16 - math.log(total), -math.log(total)], abs=1e-5)


def test_gradients_of_negative_and_zero_weights_have_their_sign(backend: str) -> None:
    """One row's weight turned round turns its gradient round, and no other's."""
    problem = make_problem(T=12, V=40, H=8)
    plain = run(problem, Objective(), backend=backend)[0].x_grad
    problem.token_weight[4] *= -1
    problem.token_weight[7] = 0.0
    turned = run(problem, Objective(), backend=backend)[0].x_grad
    assert torch.equal(turned[4], -plain[4])
    assert not turned[7].any()
    rest = [row for row in range(12) if row not in (4, 7)]
    assert torch.equal(turned[rest], plain[rest])
