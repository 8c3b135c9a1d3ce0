"""policy_loss in Triton against autograd and numpy (policy_oracle.py): every row of the table, and its statistics."""

from __future__ import annotations

import itertools
import math
from typing import Any

import policy_oracle as oracle
import pytest
import torch
from policy_oracle import CORRECTED, OBJECTIVES, label

from headway_kernels.errors import NumericsError, UnsupportedOption
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import PolicyLoss, policy_loss
from headway_kernels.policy_stats import SUMS

# Two blocks of 128 tokens, the second ragged; segments: empty, one token, within a block, across both.
T, SEGMENTS = 150, [0, 0, 1, 40, 40, 145, 150]
KL = itertools.cycle((("none", 0.0), ("k1", 0.05), ("k2", 0.0), ("k3", 0.1)))
CASES = [
    ({**options}, kl, entropy) for options, (kl, entropy) in zip((*OBJECTIVES, *CORRECTED), KL, strict=False)
]


def make_tokens(proximal: bool = False) -> tuple[torch.Tensor, torch.Tensor, oracle.Tokens]:
    """Log-probs, entropies and the rest; a fifth of the tokens masked, one weight negative."""
    generator = torch.Generator().manual_seed(7)

    def normal() -> torch.Tensor:
        return torch.randn(T, generator=generator)

    logp = -3 * torch.rand(T, generator=generator)
    weight = torch.rand(T, generator=generator) / T
    weight[::5] = 0.0
    weight[41:45] = 0.0
    weight[1] = -weight[1]
    tokens = oracle.Tokens(
        logp + 0.4 * normal(), normal(), weight, torch.tensor(SEGMENTS), logp + 0.4 * normal(),
        logp + 0.3 * normal() if proximal else None,
    )  # fmt: skip
    return logp, torch.rand(T, generator=generator), tokens


def run(
    objective: Objective, logp: torch.Tensor, entropy: torch.Tensor, tokens: oracle.Tokens, **options: Any
) -> PolicyLoss:
    return policy_loss(
        logp, tokens.behaviour, tokens.advantage, tokens.token_weight, objective=objective,
        segments=tokens.segments, reference=tokens.reference, proximal=tokens.proximal, entropy=entropy,
        backend="triton", **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "kl", "entropy_coef"), CASES, ids=lambda v: label(v) if isinstance(v, dict) else str(v)
)
def test_every_row_of_the_table(options: dict[str, Any], kl: str, entropy_coef: float) -> None:
    """The grid is a diagonal of table x KL x entropy; tests/kernels/test_parity.py has the cross product."""
    fields = dict(options)
    proximal = fields.pop("proximal", False)
    objective = Objective(**fields, kl=kl, kl_coef=0.0 if kl == "none" else 0.1, entropy_coef=entropy_coef)
    logp, entropy, tokens = make_tokens(proximal)
    leaf = logp.double().requires_grad_()
    loss = oracle.policy_loss(objective, leaf, entropy.double(), tokens)
    (gradient,) = torch.autograd.grad(loss, leaf)
    out = run(objective, logp, entropy, tokens)
    torch.testing.assert_close(out.loss, loss.detach(), rtol=1e-5, atol=1e-6)
    assert float((out.coefficient.double() - gradient).abs().max()) <= 1e-5 * float(gradient.abs().max())
    assert (out.coefficient[tokens.token_weight == 0] == 0).all()
    expected = oracle.statistics(objective, logp.double(), entropy.double(), tokens)
    for name in SUMS:
        assert out.stats.total(name) == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
    kept = tokens.token_weight != 0
    d = (logp - tokens.behaviour).double()[kept]
    assert out.stats.log_ratio_max == pytest.approx(float(d.abs().max()), rel=1e-6)
    assert out.stats.ratio_max == pytest.approx(math.exp(float(d.max())), rel=1e-5)
    assert float(out.stats.buckets.sum()) == int(kept.sum())
    assert float(torch.quantile(d.exp(), 0.9, interpolation="higher")) <= out.stats.ratio_quantile(0.9) * (
        1 + 1e-6
    )


@pytest.mark.parametrize("options", [{"name": "cispo"}, {"name": "gspo"}, {"name": "m2po"}], ids=label)
def test_what_a_masked_token_holds_reaches_nothing(options: dict[str, Any]) -> None:
    """A1: masked tokens contribute exactly 0, whatever their inputs hold."""
    logp, entropy, tokens = make_tokens()
    clean = run(Objective(**options), logp, entropy, tokens)
    logp[0], tokens.behaviour[5], tokens.advantage[10], entropy[15] = (
        torch.nan,
        torch.inf,
        torch.nan,
        torch.nan,
    )
    dirty = run(Objective(**options), logp, entropy, tokens)
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean.coefficient, dirty.coefficient)
    assert torch.equal(clean.stats.sums, dirty.stats.sums)


@pytest.mark.parametrize("options", OBJECTIVES, ids=label)
def test_extreme_ratios_stay_finite(options: dict[str, Any]) -> None:
    """A1: exponents are bounded before exp; what is reported is not clamped."""
    logp, _, tokens = make_tokens()
    tokens.behaviour[1], tokens.behaviour[2], tokens.advantage[3] = -91.0, -91.0, 0.0
    logp[6] = -120.0
    out = run(Objective(**options), logp, torch.zeros(T), tokens)
    assert math.isfinite(float(out.loss))
    assert torch.isfinite(out.coefficient).all()
    assert torch.isfinite(out.stats.sums).all()
    assert out.stats.log_ratio_max > 110


@pytest.mark.parametrize(
    "options", [{"name": "cispo"}, {"name": "gspo"}, {"name": "grpo", "correction": "tis"}], ids=label
)
@pytest.mark.parametrize("field", ["behaviour", "advantage", "token_weight"])
def test_a_weighted_value_that_is_not_finite_is_counted_and_never_hidden(
    options: dict[str, Any], field: str
) -> None:
    logp, entropy, tokens = make_tokens()
    getattr(tokens, field)[7] = torch.nan
    out = run(Objective(**options), logp, entropy, tokens)
    assert math.isnan(float(out.loss))
    assert math.isnan(float(out.coefficient[7]))
    with pytest.raises(NumericsError, match="1 tokens"):
        out.stats.check()
    assert torch.isfinite(out.stats.sums).all()


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    logp, entropy, tokens = make_tokens()
    whole = run(Objective("grpo"), logp, entropy, tokens).coefficient
    for token in (0, 1, 127, 128, 149):
        one = slice(token, token + 1)
        alone = oracle.Tokens(
            tokens.behaviour[one], tokens.advantage[one], tokens.token_weight[one], torch.tensor([0, 1])
        )
        assert torch.equal(run(Objective("grpo"), logp[one], entropy[one], alone).coefficient, whole[one])


def test_nothing_to_train_is_exactly_zero() -> None:
    logp, entropy, tokens = make_tokens()
    tokens.token_weight.zero_()
    for name in ("cispo", "gspo", "m2po"):
        out = run(Objective(name), logp, entropy, tokens)
        assert float(out.loss) == 0.0
        assert not out.coefficient.any()
        assert (out.stats.num_tokens, out.stats.ess, out.stats.ratio_max) == (0, 1.0, 0.0)
    nothing = torch.zeros(0)
    empty = oracle.Tokens(nothing, nothing, nothing, torch.tensor([0]))
    for name in ("cispo", "gspo"):
        assert run(Objective(name), nothing, nothing, empty).coefficient.shape == (0,)


def test_bf16_inputs_are_widened_before_anything_else() -> None:
    logp, entropy, tokens = make_tokens()
    for name in ("behaviour", "advantage"):
        setattr(tokens, name, getattr(tokens, name).bfloat16())
    half = run(Objective("grpo"), logp, entropy, tokens)
    for name in ("behaviour", "advantage"):
        setattr(tokens, name, getattr(tokens, name).float())
    assert torch.equal(half.coefficient, run(Objective("grpo"), logp, entropy, tokens).coefficient)


def test_fp64_is_refused_not_rounded() -> None:
    logp, entropy, tokens = make_tokens()
    with pytest.raises(UnsupportedOption, match="float64"):
        run(Objective(), logp.double(), entropy, tokens)
