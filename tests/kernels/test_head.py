"""head_logp and head_loss_step of the reference back-end against fp64 autograd written on its own.

Legend: T rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from head_oracle import HEADS, MASKS, Problem, check, make_problem, oracle_rows, run
from policy_oracle import CORRECTED, OBJECTIVES, label
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway_kernels import head, registry
from headway_kernels.errors import BackendUnavailable, NumericsError, ShapeError, UnsupportedOption
from headway_kernels.objective import Objective

head_logp = functools.partial(head.head_logp, backend="reference")
head_loss_step = functools.partial(head.head_loss_step, backend="reference")

TERMS = tuple(itertools.product(MASKS, ("none", "k1", "k2", "k3"), (0.0, 0.05)))
ROWS = (*OBJECTIVES, *CORRECTED)


def check_terms(options: dict[str, Any], terms: Sequence[tuple[str, str, float]]) -> None:
    for mask, kl, entropy_coef in terms:
        chosen = {**options, "kl": kl, "kl_coef": 0.0 if kl == "none" else 0.1, "entropy_coef": entropy_coef}
        check(make_problem(mask=mask), chosen, rel=1e-5, chunk_rows=5)


@pytest.mark.parametrize("index", range(len(ROWS)), ids=lambda index: label(ROWS[index]))
def test_combinations_have_the_gradients_of_autograd(index: int) -> None:
    """Every row of the table with a diagonal of masks, KL and entropy terms; all of them in the slow suite."""
    check_terms(ROWS[index], TERMS[index % 9 :: 9])


@pytest.mark.slow
@pytest.mark.parametrize("options", ROWS, ids=label)
def test_every_combination_has_the_gradients_of_autograd(options: dict[str, Any]) -> None:
    """The full cross of options, fused against plain."""
    check_terms(options, TERMS)


HEAD_OBJECTIVES = (
    {"name": "cispo", "cap": 1.1},
    {"name": "grpo", "correction": "tis", "correction_cap": 1.2, "proximal": True, "dual_clip": 1.3},
    {"name": "gspo", "clip_low": 0.05, "clip_high": 0.05},
)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("options", HEAD_OBJECTIVES, ids=label)
def test_every_head_has_the_gradients_of_autograd(head: str, options: dict[str, Any]) -> None:
    """Temperature per token, bias, softcap and logit scale, alone and together."""
    terms = itertools.product(MASKS, (0.0, 0.05))
    for (mask, entropy_coef), rows in zip(terms, itertools.cycle((1, 4, 100))):
        chosen = {**options, "kl": "k3", "kl_coef": 0.1, "entropy_coef": entropy_coef}
        check(make_problem(head=head, mask=mask), chosen, rel=1e-5, chunk_rows=rows)


def test_in_fp64_the_gradients_are_exact() -> None:
    for index, options in enumerate(ROWS):
        chosen = {**options, "kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.05 * (index % 2)}
        head_name = list(HEADS)[index % len(HEADS)]
        check(make_problem(head=head_name, mask="some", dtype=torch.float64), chosen, rel=1e-12, chunk_rows=6)


# V: 1 and 7 are below a vector; 127..257 and 1023, 1025 straddle powers of two; the rest are real ones.
SIZES = (
    (1, 3, 8), (7, 17, 65), (127, 1, 64), (128, 17, 8), (129, 129, 65), (255, 3, 256), (257, 17, 64),
    (1023, 129, 8), (1025, 3, 65), (32000, 17, 8), (50257, 3, 64), (65537, 1, 8), (129920, 3, 8),
    (151936, 3, 8), (256000, 1, 8), (262145, 1, 8),
)  # fmt: skip


@pytest.mark.parametrize(("V", "T", "H"), SIZES)
def test_any_vocabulary_with_targets_at_both_ends(V: int, T: int, H: int) -> None:
    """Every real logit is near -60, so that a padded column at 0 would dominate."""
    problem = make_problem(T=T, V=V, H=H, head="bias")
    problem.bias = torch.full((V,), -60.0)
    problem.target[0] = V - 1
    problem.target[-1] = 0
    logp, entropy = (t.detach() for t in oracle_rows(problem))
    out = head_logp(
        problem.x, problem.weight, problem.target, inv_temperature=problem.inv_temperature, **problem.head()
    )
    torch.testing.assert_close(out.logp.double(), logp, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=1e-5, atol=2e-5)
    problem.behaviour = logp.float()
    check(problem, {"name": "grpo"}, rel=1e-4, chunk_rows=2)  # fp32 logits at -150 are 1.5e-5 apart
    if V == 1:
        step, weight_grad, _ = run(problem, Objective())
        assert (out.logp == 0).all()
        assert (step.x_grad == 0).all()
        assert (weight_grad == 0).all()


# Rows: one, an odd few, one more than a vector register, one more than a power of two. Hidden: below, at and above a
# cache line of fp32, and a power of two.
GRID_V = (1, 7, 127, 128, 129, 255, 257, 1023, 1025, 32000, 50257, 65537, 129920, 151936, 256000, 262145)


@pytest.mark.slow
@pytest.mark.parametrize("V", GRID_V)
def test_every_size_of_the_grid(V: int) -> None:
    """All of T x H at every vocabulary, targets in the first and the last column."""
    for T, H in itertools.product((1, 3, 17, 129), (8, 64, 65, 256)):
        if T * H * V > 17 * 65 * 65537:
            continue  # the sizes are covered one by one; all of it must run within five minutes
        problem = make_problem(T=T, V=V, H=H, head="mixed", mask="some" if T > 1 else "none")
        problem.x /= math.sqrt(H)  # logits of one size: what is tested is the indexing, at fp32's accuracy
        problem.target[0], problem.target[-1] = V - 1, 0
        problem.behaviour = oracle_rows(problem)[0].detach().float() + 0.1
        check(problem, {"name": "cispo", "cap": 0.95}, rel=1e-5, chunk_rows=5)


def test_a_row_s_scores_are_the_same_alone_and_in_any_batch() -> None:
    """Within 1e-6 where a vendor's matrix product is used."""
    problem = make_problem(T=17, V=1025, H=65, head="all")
    rows = {"inv_temperature": problem.inv_temperature, **problem.head()}
    whole = head_logp(problem.x, problem.weight, problem.target, **rows)
    for index in range(17):
        one = slice(index, index + 1)
        rows["inv_temperature"] = problem.inv_temperature[one]
        alone = head_logp(problem.x[one], problem.weight, problem.target[one], **rows)
        for got, want in zip(alone, whole, strict=True):
            torch.testing.assert_close(got[0], want[index], rtol=1e-6, atol=1e-6)


def test_offsets_beyond_2_to_the_31_are_not_truncated(tmp_path: Path) -> None:
    """Rows 2^29 elements apart, in a sparse file that is mapped: row 4 starts at element 2^31."""
    problem = make_problem(T=5, V=9, H=8, dtype=torch.bfloat16)
    apart, step = 5 << 29, 1 << 29
    mapped = torch.from_file(str(tmp_path / "sparse"), shared=True, size=apart, dtype=torch.bfloat16)
    x = mapped.as_strided((5, 8), (step, 1))
    x.copy_(problem.x)
    columns = {}
    for place, name in enumerate(("behaviour", "advantage", "token_weight", "inv_temperature")):
        value = getattr(problem, name).to(torch.bfloat16)
        setattr(problem, name, value)
        columns[name] = mapped.as_strided((5,), (step,), 64 * (place + 1))
        columns[name].copy_(value)
    near, near_grad, _ = run(problem, Objective("grpo"))
    far_grad = torch.zeros(9, 8)
    far = head_loss_step(
        x,
        problem.weight,
        problem.target,
        segments=None,
        objective=Objective("grpo"),
        weight_grad=far_grad,
        **columns,
    )
    assert torch.equal(far.loss, near.loss)
    assert torch.equal(far.x_grad, near.x_grad)
    assert torch.equal(far_grad, near_grad)


@pytest.mark.parametrize("name", ["behaviour", "advantage", "x"])
def test_a_value_that_is_not_finite_names_its_token(name: str) -> None:
    problem = make_problem()
    getattr(problem, name)[7] = torch.nan
    with pytest.raises(NumericsError, match="token 7 "):
        run(problem, Objective(), chunk_bytes=33 * 4 * 3)


def test_an_empty_row_is_a_loss_of_zero() -> None:
    empty = torch.zeros(0)
    for objective in (Objective(), Objective("gspo")):
        out = head_loss_step(
            torch.zeros(0, 8), torch.zeros(33, 8), torch.zeros(0, dtype=torch.int64), inv_temperature=empty,
            behaviour=empty, advantage=empty, token_weight=empty, segments=torch.tensor([0]),
            objective=objective,
            weight_grad=torch.zeros(33, 8),
        )  # fmt: skip
        assert float(out.loss) == 0.0
        assert out.x_grad.shape == (0, 8)
        assert (out.stats.num_tokens, out.stats.ess, out.stats.ratio_max, out.stats.ratio_p99) == (
            0,
            1.0,
            0.0,
            0.0,
        )


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 9, 100])
def test_segment_ratios_do_not_depend_on_chunks_even_when_a_segment_outgrows_one(rows: int) -> None:
    problem = make_problem(T=40, mask="some")
    problem.segments = torch.tensor([0, 0, 2, 7, 7, 29, 31, 40, 40])
    check(problem, {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1, "entropy_coef": 0.05}, 1e-5, rows)
    out, _, _ = run(problem, Objective("gspo"), chunk_bytes=rows * 33 * 4)
    assert out.stats.total("segments") == 5


def test_gradients_are_added_to_the_given_buffers() -> None:
    problem = make_problem(head="bias")
    _, fresh, fresh_bias = run(problem, Objective())
    assert fresh_bias is not None
    weight_grad, bias_grad = torch.full((33, 8), 2.0), torch.full((33,), 3.0)
    head_loss_step(
        problem.x, problem.weight, problem.target, inv_temperature=problem.inv_temperature,
        behaviour=problem.behaviour, advantage=problem.advantage, token_weight=problem.token_weight,
        segments=None, objective=Objective(), weight_grad=weight_grad, bias_grad=bias_grad, bias=problem.bias,
    )  # fmt: skip
    torch.testing.assert_close(weight_grad - 2, fresh, rtol=0, atol=1e-6)
    torch.testing.assert_close(bias_grad - 3, fresh_bias, rtol=0, atol=1e-6)


class NoLargeTensor(TorchDispatchMode):
    """Fails on any result of `limit` elements or more."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.largest = limit, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                assert tensor.numel() < self.limit, f"{func} made {list(tensor.shape)}"
        return out


def repeat_rows(problem: Problem, T: int) -> None:
    """Makes T rows out of the problem's, a fifth of them masked, one segment longer than any chunk."""
    index = torch.arange(T) % problem.x.shape[0]
    for name in ("x", "target", "inv_temperature", "behaviour", "advantage", "token_weight"):
        setattr(problem, name, getattr(problem, name)[index].clone())
    problem.token_weight[::5] = 0.0
    problem.segments = torch.tensor([0, T // 16, T // 2, T])


@pytest.mark.parametrize("options", [{"entropy_coef": 0.01}, {"name": "gspo"}, {"name": "m2po"}], ids=str)
def test_no_tensor_of_half_the_logits_ever_exists(options: dict[str, Any]) -> None:
    """Also with masked rows, whose chunks are compacted, and rows that outgrow a chunk."""
    T, V = 1024, 16000
    problem = make_problem(T=64, V=V, H=4)
    repeat_rows(problem, T)
    with NoLargeTensor(T * V // 2) as watch:
        run(problem, Objective(**options), chunk_bytes=7 << 20)
        head_logp(
            problem.x, problem.weight, problem.target, inv_temperature=problem.inv_temperature,
            chunk_bytes=7 << 20,
        )  # fmt: skip
    assert watch.largest <= (7 << 20) // 4


PEAK = """
import resource, sys, torch
sys.path[:0] = {paths!r}
from headway_kernels.head import head_loss_step
from headway_kernels.objective import Objective
from torch.utils._python_dispatch import TorchDispatchMode
T, V, H = {T}, 151936, 256

class NoLargeTensor(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {{}}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and T >= 8192:
                assert tensor.numel() < T * V // 2, (func, tensor.shape)
        return out

torch.manual_seed(0)
x, weight, grad = torch.randn(T, H), torch.randn(V, H), torch.zeros(V, H)
noise = torch.randn(T)
rows = dict(
    inv_temperature=torch.ones(T), behaviour=noise - 20, advantage=noise, token_weight=torch.ones(T) / T,
    segments=None, weight_grad=grad, backend={backend!r},
)
grad.fill_(0)
target = torch.randint(0, V, (T,))

def step(x, weight, target, chunk_bytes, **rows):
    return head_loss_step(x, weight, target, objective=Objective("grpo"), chunk_bytes=chunk_bytes, **rows)

with NoLargeTensor():  # torch loads a good deal the first time that a mode watches these operations
    few = {{name: value[:9] if hasattr(value, "dim") else value for name, value in rows.items()}}
    step(x[:9], weight[:33], target[:9] % 33, 999, **few | {{"weight_grad": torch.zeros(33, H)}})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with NoLargeTensor():
    out = step(x, weight, target, {chunk}, **rows)
assert torch.isfinite(out.loss)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def peak_bytes(T: int, chunk: int, backend: str) -> int:
    """Memory that a step adds to a fresh process, dL/dx included; dL/dweight is there before."""
    program = PEAK.format(paths=sys.path, T=T, chunk=chunk, backend=backend)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) << 10


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_peak_memory_is_the_chunk_and_the_gradients_whatever_t_is(backend: str) -> None:
    """At V = 151,936, H = 256: chunk budget + gradients + 5 %, at T = 8192 as at 864; no tensor of T V / 2."""
    if registry.available("head_loss_step")[backend]:
        pytest.skip(registry.available("head_loss_step")[backend])
    chunk, weight_grad, x_grad = 256 << 20, 151936 * 256 * 4, 8192 * 256 * 4
    few, many = (peak_bytes(T, chunk, backend) for T in (864, 8192))  # two and nineteen chunks of 432 rows
    allowed = 1.05 * (chunk + weight_grad + x_grad)
    print(f"{backend}: chunk and gradients + {many + weight_grad - allowed / 1.05:,.0f} bytes at T = 8192")
    assert weight_grad + many <= allowed
    assert many - few <= x_grad + 0.05 * chunk


def test_two_calls_agree_bit_for_bit() -> None:
    problem = make_problem(T=64, mask="some")
    first, second = (
        run(problem, Objective("gspo", kl="k3", kl_coef=0.1), reference=problem.reference) for _ in "ab"
    )
    assert torch.equal(first[0].x_grad, second[0].x_grad)
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[0].stats.sums, second[0].stats.sums)


def test_log_probs_of_the_step_are_those_of_head_logp() -> None:
    problem = make_problem(head="all")
    out, _, _ = run(problem, Objective())
    alone = head_logp(
        problem.x, problem.weight, problem.target, inv_temperature=problem.inv_temperature, **problem.head()
    )
    logp, entropy = (t.detach() for t in oracle_rows(problem))
    assert torch.equal(out.logp, alone.logp)
    torch.testing.assert_close(alone.logp.double(), logp, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(alone.entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    assert out.entropy is not None
    assert torch.equal(out.entropy, alone.entropy)
    assert run(problem, Objective(), want_entropy=False)[0].entropy is None


def test_masked_columns_of_a_bias_keep_the_entropy_finite() -> None:
    problem = make_problem(head="bias")
    assert problem.bias is not None
    problem.bias[5] = -torch.inf
    problem.target[problem.target == 5] = 6
    out, weight_grad, _ = run(problem, Objective(entropy_coef=0.1))
    assert out.entropy is not None
    assert torch.isfinite(out.entropy).all()
    assert torch.isfinite(weight_grad).all()
    assert not weight_grad[5].any()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"backend": "cuda"}, BackendUnavailable),
        ({"backend": "metal"}, UnsupportedOption),
        ({"softcap": -1.0}, UnsupportedOption),
        ({"proximal": torch.zeros(17)}, UnsupportedOption),
        ({"objective": Objective(kl="k3", kl_coef=0.1)}, ShapeError),
        ({"objective": Objective("gspo"), "segments": None}, ShapeError),
        ({"objective": Objective("gspo"), "segments": torch.tensor([0, 9, 5, 17])}, ShapeError),
        ({"behaviour": None}, ShapeError),
        ({"behaviour": torch.zeros(16)}, ShapeError),
        ({"target": torch.full((17,), 33)}, ShapeError),
        ({"target": torch.full((17,), -1)}, ShapeError),
        ({"target": torch.zeros(17, dtype=torch.int32)}, ShapeError),
        ({"inv_temperature": torch.ones(1)}, ShapeError),
        ({"weight": torch.zeros(33, 9)}, ShapeError),
        ({"weight": torch.zeros(33, 8, dtype=torch.float64)}, ShapeError),
        ({"bias": torch.zeros(32)}, ShapeError),
        ({"bias_grad": torch.zeros(33)}, ShapeError),
        ({"weight_grad": torch.zeros(33, 8, dtype=torch.bfloat16)}, ShapeError),
    ],
)
def test_what_the_step_cannot_do_is_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    problem = make_problem()
    arguments = {
        "x": problem.x, "weight": problem.weight, "target": problem.target,
        "inv_temperature": problem.inv_temperature, "behaviour": problem.behaviour,
        "advantage": problem.advantage,
        "token_weight": problem.token_weight, "segments": problem.segments, "objective": Objective(),
        "weight_grad": None, **changes,
    }  # fmt: skip
    with pytest.raises(error):
        head_loss_step(**arguments)
