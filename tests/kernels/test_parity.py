"""Every back-end that this machine has, over the cross product of options, against fp64 autograd.

A back-end computes a call right, or refuses it by name: nothing in between. Statistics are part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import policy_oracle as oracle
import pytest
import torch
from head_oracle import HEADS, MASKS, check, make_problem, oracle_rows
from policy_oracle import CORRECTED, OBJECTIVES, label

from headway_kernels import registry
from headway_kernels.errors import UnsupportedOption
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import policy_loss
from headway_kernels.policy_stats import SUMS

ROWS = (*OBJECTIVES, *CORRECTED)
OPTIONS = itertools.product(MASKS, HEADS, ("none", "k1", "k2", "k3"), (0.0, 0.05))
# The chunk's size is not crossed with the rest, it goes round.
TERMS = tuple((*terms, rows) for terms, rows in zip(OPTIONS, itertools.cycle((1, 5, 100))))
OTHERS = [name for name in registry.ORDER if name != "reference"]


def backends(op: str) -> list[str]:
    """Those that can run the op here, the reference left out: its own tests have it."""
    found = registry.available(op)
    return [name for name in OTHERS if not found[name]]


def check_refusal(backend: str, refusal: UnsupportedOption) -> None:
    """It names the back-end, and comes from it, not from the checks of all."""
    assert f"{backend!r} lacks this call" in str(refusal)


def check_head(backend: str, options: dict[str, Any], terms: Sequence[tuple[Any, ...]]) -> int:
    """How many of the terms the back-end computed; the others it refused."""
    computed = 0
    for mask, head, kl, entropy_coef, chunk_rows in terms:
        chosen = {**options, "kl": kl, "kl_coef": 0.0 if kl == "none" else 0.1, "entropy_coef": entropy_coef}
        try:
            check(make_problem(mask=mask, head=head), chosen, 1e-5, chunk_rows, backend)
        except UnsupportedOption as refusal:
            check_refusal(backend, refusal)
        else:
            computed += 1
    return computed


@pytest.mark.parametrize("backend", OTHERS)
def test_head_loss_step_is_right_or_refused(backend: str) -> None:
    """Every row of the table, with a diagonal through masks, heads, KL, entropy and chunk sizes."""
    if backend not in backends("head_loss_step"):
        pytest.skip(f"{backend}: {registry.available('head_loss_step')[backend]}")
    computed = [check_head(backend, options, TERMS[index % 101 :: 101]) for index, options in enumerate(ROWS)]
    assert sum(computed) > 0, "it refuses every call"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("options", ROWS, ids=label)
def test_head_loss_step_is_right_or_refused_in_every_combination(
    backend: str, options: dict[str, Any]
) -> None:
    if backend not in backends("head_loss_step"):
        pytest.skip(f"{backend}: {registry.available('head_loss_step')[backend]}")
    check_head(backend, options, TERMS)


@pytest.mark.parametrize("backend", OTHERS)
def test_policy_loss_is_right_or_refused(backend: str) -> None:
    if backend not in backends("policy_loss"):
        pytest.skip(f"{backend}: {registry.available('policy_loss')[backend]}")
    computed = 0
    for options, kl in itertools.product(ROWS, ("none", "k1", "k2", "k3")):
        fields = {name: value for name, value in options.items() if name != "proximal"}
        objective = Objective(**fields, kl=kl, kl_coef=0.0 if kl == "none" else 0.1)
        problem = make_problem(mask="some")
        tokens = oracle.Tokens(
            problem.behaviour, problem.advantage, problem.token_weight, problem.segments, problem.reference,
            problem.proximal if options.get("proximal") else None,
        )  # fmt: skip
        logp = (problem.behaviour + 0.2).double().requires_grad_()
        loss = oracle.policy_loss(objective, logp, torch.zeros(17), tokens)
        (gradient,) = torch.autograd.grad(loss, logp)
        try:
            out = policy_loss(
                logp.detach().float(), tokens.behaviour, tokens.advantage, tokens.token_weight, objective=objective,
                segments=tokens.segments, reference=tokens.reference, proximal=tokens.proximal, backend=backend,
            )  # fmt: skip
        except UnsupportedOption as refusal:
            check_refusal(backend, refusal)
            continue
        computed += 1
        torch.testing.assert_close(out.loss, loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out.coefficient.double(), gradient, rtol=1e-5, atol=1e-6)
        expected = oracle.statistics(objective, logp.detach(), torch.zeros(17), tokens)
        for name in SUMS:
            assert out.stats.total(name) == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
    assert computed > 0, "it refuses every call"


@pytest.mark.slow
@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize(("T", "V", "H"), [(3, 65537, 8), (17, 65537, 8), (3, 151936, 65)])
def test_gradients_over_a_real_vocabulary_keep_their_digits(backend: str, T: int, V: int, H: int) -> None:
    """1e-5 of fp64: a sum over V that runs through one fp32 accumulator is off by several times that."""
    if backend not in backends("head_loss_step"):
        pytest.skip(f"{backend}: {registry.available('head_loss_step')[backend]}")
    problem = make_problem(T=T, V=V, H=H, head="mixed", mask="some")
    problem.x /= H**0.5
    problem.behaviour = oracle_rows(problem)[0].detach().float() + 0.1
    check(problem, {"name": "cispo", "cap": 0.95}, 1e-5, 5, backend)
