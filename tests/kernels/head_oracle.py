"""A head's step the plain way: fp64 autograd over whole logits, with the policy loss of policy_oracle.py.

Legend: T rows, H hidden, V vocabulary. V = 33 and T = 17 are no multiple of a vector register.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import policy_oracle as oracle
import pytest
import torch
from policy_oracle import Tokens
from torch import Tensor

from headway_kernels.head import HeadLoss, head_loss_step
from headway_kernels.objective import Objective
from headway_kernels.policy_stats import SUMS


@dataclasses.dataclass
class Problem:
    """Inputs of a step; everything as float32 or the dtype asked for."""

    x: Tensor
    weight: Tensor
    target: Tensor
    inv_temperature: Tensor
    behaviour: Tensor
    advantage: Tensor
    token_weight: Tensor
    segments: Tensor
    reference: Tensor
    proximal: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float | None = None

    def head(self) -> dict[str, Any]:
        return {"bias": self.bias, "softcap": self.softcap, "logit_scale": self.logit_scale}


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "mixed": {"temperature": None},
    "bias": {"bias": True, "temperature": None},
    "softcap": {"softcap": 1.5, "temperature": None},
    "all": {"bias": True, "softcap": 2.0, "logit_scale": 0.6, "temperature": None},
}
MASKS = ("none", "some", "segment", "negative")


def make_problem(
    *,
    T: int = 17,
    V: int = 33,
    H: int = 8,
    head: str = "plain",
    mask: str = "none",
    dtype: torch.dtype = torch.float32,
) -> Problem:
    generator = torch.Generator().manual_seed(T * 1000 + V)
    options = HEADS[head]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight, target = normal(T, H), normal(V, H), torch.randint(0, V, (T,), generator=generator)
    temperature = options.get("temperature", 1.0)
    inverse = (
        torch.rand(T, generator=generator) * 2 + 0.5
        if temperature is None
        else torch.full((T,), 1 / temperature)
    )
    token_weight = torch.rand(T, generator=generator) / T
    if mask == "some":
        token_weight[::3] = 0.0
    elif mask == "segment":
        token_weight[: T // 3] = 0.0
    elif mask == "negative":
        token_weight[0], token_weight[1] = 0.0, -token_weight[1]
    problem = Problem(
        x, weight, target, inverse, x, normal(T), token_weight,
        torch.tensor(sorted({0, T // 3, T // 3, T - 4, T})), x, x,
        bias=normal(V) if options.get("bias") else None,
        softcap=options.get("softcap"), logit_scale=options.get("logit_scale"),
    )  # fmt: skip
    logp = oracle_rows(problem)[0].detach()
    problem.behaviour = (logp + 0.4 * normal(T)).to(dtype)
    problem.reference = (logp + 0.4 * normal(T)).to(dtype)
    problem.proximal = (logp + 0.3 * normal(T)).to(dtype)
    return problem


def oracle_rows(problem: Problem, leaves: tuple[Tensor, ...] | None = None) -> tuple[Tensor, Tensor]:
    """Log-prob of the target and entropy, the plain way in fp64."""
    x, weight, bias = leaves if leaves else double_leaves(problem)
    logits = (x @ weight.T + bias) * (problem.logit_scale or 1.0)
    if problem.softcap:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    logp = torch.log_softmax(logits * problem.inv_temperature.double()[:, None], 1)
    return logp.gather(1, problem.target[:, None])[:, 0], -(logp.exp() * logp).sum(1)


def double_leaves(problem: Problem) -> tuple[Tensor, ...]:
    bias = torch.zeros(problem.weight.shape[0]) if problem.bias is None else problem.bias
    return tuple(t.detach().double().clone().requires_grad_() for t in (problem.x, problem.weight, bias))


def oracle_loss(
    problem: Problem, objective: Objective, use_proximal: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The step's loss under autograd, straight from the papers; returns it with the leaves."""
    leaves = double_leaves(problem)
    logp, entropy = oracle_rows(problem, leaves)
    return oracle.policy_loss(objective, logp, entropy, tokens_of(problem, use_proximal)), leaves


def tokens_of(problem: Problem, use_proximal: bool) -> Tokens:
    """The policy loss's inputs."""
    return Tokens(
        problem.behaviour, problem.advantage, problem.token_weight, problem.segments,
        problem.reference, problem.proximal if use_proximal else None,
    )  # fmt: skip


def check_statistics(out: HeadLoss, problem: Problem, objective: Objective, use_proximal: bool) -> None:
    """Every sum against numpy; log-probs in fp32 are off by 1e-6, counts are exact."""
    logp, entropy = (tensor.detach() for tensor in oracle_rows(problem))
    tokens = tokens_of(problem, use_proximal)
    if objective.kl == "none":
        tokens.reference = None
    expected = oracle.statistics(objective, logp, entropy, tokens)
    for name in SUMS:
        assert out.stats.total(name) == pytest.approx(expected[name], rel=1e-4, abs=1e-4), name


def run(problem: Problem, objective: Objective, **options: Any) -> tuple[HeadLoss, Tensor, Tensor | None]:
    """The step, on the reference unless told otherwise, with gradients in fresh buffers."""
    dtype = torch.promote_types(problem.x.dtype, torch.float32)
    weight_grad = torch.zeros(problem.weight.shape, dtype=dtype)
    bias_grad = None if problem.bias is None else torch.zeros(problem.bias.shape, dtype=dtype)
    out = head_loss_step(
        problem.x, problem.weight, problem.target, inv_temperature=problem.inv_temperature,
        behaviour=problem.behaviour, advantage=problem.advantage, token_weight=problem.token_weight,
        segments=problem.segments, objective=objective, weight_grad=weight_grad, bias_grad=bias_grad,
        **({"backend": "reference"} | problem.head() | options),
    )  # fmt: skip
    return out, weight_grad, bias_grad


def assert_near(got: Tensor, want: Tensor | None, rel: float) -> None:
    assert want is not None
    assert torch.isfinite(got).all()
    scale = max(float(want.abs().max()), 1e-12)
    assert float((got.double() - want).abs().max()) <= rel * scale


def check(
    problem: Problem, options: dict[str, Any], rel: float, chunk_rows: int, backend: str = "reference"
) -> None:
    """Loss, both gradients and statistics of one step against autograd, relative to the largest element."""
    fields = dict(options)
    use_proximal = fields.pop("proximal", False)
    objective = Objective(**fields)
    loss, (x, weight, bias) = oracle_loss(problem, objective, use_proximal)
    loss.backward()
    extra: dict[str, Any] = {"proximal": problem.proximal} if use_proximal else {}
    if objective.kl != "none":
        extra["reference"] = problem.reference
    row_bytes = problem.weight.shape[0] * problem.x.element_size() * (2 if problem.softcap else 1)
    out, weight_grad, bias_grad = run(
        problem, objective, chunk_bytes=chunk_rows * row_bytes, backend=backend, **extra
    )
    check_statistics(out, problem, objective, use_proximal)
    assert float(out.loss) == pytest.approx(float(loss.detach()), rel=rel, abs=rel)
    assert_near(out.x_grad, x.grad, rel)
    assert_near(weight_grad, weight.grad, rel)
    if bias_grad is not None:
        assert_near(bias_grad, bias.grad, rel)
    assert (out.x_grad[problem.token_weight == 0] == 0).all()
