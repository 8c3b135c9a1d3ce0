"""policy_loss: hand-computed values, exact gradients by enumeration, statistics against numpy."""

from __future__ import annotations

import itertools
import math
import pickle
from typing import Any

import numpy as np
import policy_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_oracle import CORRECTED, OBJECTIVES, Tokens, label
from torch import Tensor

from headway_kernels.errors import NumericsError, ShapeError, UnsupportedOption
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import PolicyLoss, policy_loss
from headway_kernels.policy_stats import SUMS, PolicyStats


def evaluate(logp: Any, behaviour: Any, advantage: Any, weight: Any = None, **options: Any) -> PolicyLoss:
    """policy_loss of lists, in fp64, with weights of 1 and one segment unless told."""
    tensors = [torch.as_tensor(value, dtype=torch.float64) for value in (logp, behaviour, advantage)]
    ones = torch.ones_like(tensors[0])
    token_weight = ones if weight is None else torch.as_tensor(weight, dtype=torch.float64)
    options.setdefault("segments", torch.tensor([0, len(ones)]))
    for name in ("reference", "proximal", "entropy"):
        if name in options:
            options[name] = torch.as_tensor(options[name], dtype=torch.float64)
    objective = options.pop("objective", Objective())
    return policy_loss(tensors[0], tensors[1], tensors[2], token_weight, objective=objective, **options)


HALF, TWO, NINE = math.log(0.5), math.log(2.0), math.log(9.0)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        # Ratios 0.5, 2, 2, 0.5, 9, with advantages 1, 1, -1, -1, -1; the coefficient is dL/dlogp.
        (Objective("cispo", cap=3.0), [-0.5, -2, 2, 0.5, 3]),
        (Objective("grpo"), [-0.5, 0, 2, 0, 9]),
        (Objective("grpo", dual_clip=4.0), [-0.5, 0, 2, 0, 0]),
        (Objective("dapo", clip_high=1.5), [-0.5, -2, 2, 0, 9]),
        (Objective("rloo", clip_low=0.6), [-0.5, 0, 2, 0.5, 9]),
        (Objective("dr_grpo", correction="tis", correction_cap=3.0), [-0.5, -2, 2, 0.5, 3]),
    ],
)
def test_coefficients_by_hand(objective: Objective, expected: list[float]) -> None:
    logp = [HALF, TWO, TWO, HALF, NINE]
    out = evaluate(logp, [0.0] * 5, [1.0, 1, -1, -1, -1], objective=objective)
    np.testing.assert_allclose(out.coefficient, expected, rtol=1e-12)


def test_losses_by_hand() -> None:
    """A clipped token still has a loss; cispo's is the weighted log-likelihood."""
    logp, advantage = [HALF, TWO, NINE], [1.0, 1, -1]
    clipped = evaluate(logp, [0.0] * 3, advantage, [1.0, 10, 100], objective=Objective("grpo", dual_clip=4.0))
    assert float(clipped.loss) == pytest.approx(-0.5 - 12 + 400)
    cispo = evaluate(logp, [0.0] * 3, advantage, objective=Objective(cap=3.0))
    assert float(cispo.loss) == pytest.approx(-0.5 * HALF - 2 * TWO + 3 * NINE)


def test_the_ratio_is_to_the_generator_and_clips_a_big_move() -> None:
    """R = pi_theta1 / pi_theta0 exactly; at lag 0 it is 1 and nothing clips."""
    old, new = torch.tensor([0.2, 0.8]), torch.tensor([0.6, 0.4])
    moved = evaluate(new.log(), old.log(), [1.0, -1.0], objective=Objective("grpo"))
    assert moved.stats.ratio_mean == pytest.approx((3 + 0.5) / 2, rel=1e-6)
    assert moved.stats.ratio_max == pytest.approx(3.0, rel=1e-6)
    assert moved.stats.clip_share == 1.0
    assert (moved.stats.total("clipped_high"), moved.stats.total("clipped_low")) == (1, 1)
    same = evaluate(old.log(), old.log(), [1.0, -1.0], objective=Objective("grpo"))
    assert (same.stats.ratio_mean, same.stats.clip_share, same.stats.ess) == (1.0, 0.0, 1.0)
    assert same.coefficient.tolist() == [-1.0, 1.0]


def test_a_missing_behaviour_is_refused() -> None:
    with pytest.raises(ShapeError, match="never recomputed"):
        policy_loss(
            torch.zeros(2), None, torch.zeros(2), torch.ones(2), objective=Objective(), segments=None  # type: ignore[arg-type]
        )  # fmt: skip


def test_a_small_drift_over_a_long_sequence_does_not_reject_it() -> None:
    """300 tokens at +0.005 have the geometric mean 1.005, not the product 4.48."""
    logp = torch.full((300,), 0.005, dtype=torch.float64)
    out = evaluate(logp, torch.zeros(300), torch.ones(300), objective=Objective("gspo"))
    assert out.stats.weight_mean == pytest.approx(math.exp(0.005))
    assert out.stats.segment_clip_share == 0.0
    np.testing.assert_allclose(out.coefficient, -math.exp(0.005))
    tight = evaluate(logp, torch.zeros(300), torch.ones(300), objective=Objective("gspo", clip_high=1e-3))
    assert tight.stats.segment_clip_share == 1.0
    assert tight.stats.weight_mean == pytest.approx(math.exp(0.005))  # before the clamp
    assert not tight.coefficient.any()


def test_gspo_shares_a_segment_s_loss_among_its_weighted_tokens() -> None:
    """Masked tokens are no members of the mean; the coefficient is the mean's derivative."""
    weight = [0.5, 0.25, 0.0, 1.0]
    out = evaluate(
        [0.1, 0.3, 50.0, 0.7], [0.0] * 4, [1.0, 1.0, 1.0, -2.0], weight, segments=torch.tensor([0, 3, 3, 4]),
        objective=Objective("gspo", clip_low=0.9, clip_high=9.0),
    )  # fmt: skip
    first, last = math.exp(0.2), math.exp(0.7)
    np.testing.assert_allclose(out.coefficient, [-0.375 * first, -0.375 * first, 0.0, 2 * last])
    assert float(out.loss) == pytest.approx(-0.75 * first + 2 * last)
    assert (out.stats.total("segments"), out.stats.masked_share) == (2, 0.25)


def test_rejected_tokens_stay_in_the_denominator() -> None:
    """Log r = [.1, -1.5, .8, -10, .3]; tokens 2 to 4 have no gradient and still count among the five."""
    log_ratio = torch.tensor([0.1, -1.5, 0.8, -10.0, 0.3], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1, 1, -1, 1], dtype=torch.float64)
    out = evaluate(
        log_ratio, torch.zeros(5), advantage, [0.2] * 5, objective=Objective("grpo", clip_high=0.4)
    )
    expected = [-math.exp(0.1) / 5, 0, 0, 0, -math.exp(0.3) / 5]
    np.testing.assert_allclose(out.coefficient, expected)
    assert out.stats.clip_share == pytest.approx(3 / 5)


def test_tis_counts_the_behaviour_once() -> None:
    """prox = detached pi: r = 1 and rho = pi/mu; with a proximal policy r = pi/prox and rho = prox/mu."""
    objective = Objective("grpo", correction="tis", correction_cap=1.6, clip_low=0.9, clip_high=0.9)
    plain = evaluate([0.3], [0.0], [2.0], objective=objective)
    assert plain.coefficient.item() == pytest.approx(-2 * math.exp(0.3))
    given = evaluate([0.3], [0.0], [2.0], proximal=[0.1], objective=objective)
    assert given.coefficient.item() == pytest.approx(-2 * math.exp(0.2) * math.exp(0.1))
    capped = evaluate([0.9], [0.0], [2.0], proximal=[0.7], objective=objective)
    assert capped.coefficient.item() == pytest.approx(-2 * math.exp(0.2) * 1.6)
    assert (capped.stats.total("capped"), capped.stats.weight_mean) == (1, pytest.approx(math.exp(0.7)))


@pytest.mark.parametrize("name", ["cispo", "grpo", "gspo", "sapo", "dppo_tv", "m2po", "vtrace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unbounded_ratios_stay_finite(name: str, dtype: torch.dtype) -> None:
    """(pi, mu, advantage, weight), with a masked token that contributes exactly 0."""
    rows = [(-2, -91, 1, 1), (-2, -91, 0, 1), (-2, -91, 1, 0), (-91, -2, -1, 1), (0, 0, 1, 1)]
    rows += [(-2, -91, -1, 1), (-2, -1024, -1, 1)]
    logp, behaviour, advantage, weight = torch.tensor(rows, dtype=dtype).T
    out = policy_loss(logp, behaviour, advantage, weight, objective=Objective(name), segments=torch.arange(8))
    assert math.isfinite(float(out.loss))
    assert torch.isfinite(out.coefficient).all()
    assert out.coefficient[1:3].tolist() == [0, 0]
    assert out.coefficient.dtype is torch.float32
    assert out.stats.log_ratio_max == logp[6] - behaviour[6]  # the raw one, not the clamped
    assert out.stats.ratio_max == pytest.approx(math.exp(700), rel=1e-6)  # its reported bound
    assert math.isfinite(out.stats.ratio_mean)


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=8))
def test_the_guard_changes_no_bit_of_a_ratio_within_its_bound(log_ratios: list[float]) -> None:
    logp = torch.tensor(log_ratios, dtype=torch.float64)
    out = evaluate(
        logp, torch.zeros_like(logp), torch.full_like(logp, -1.0), objective=Objective("rloo", clip_low=1)
    )
    assert torch.equal(out.coefficient, logp.exp())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["logp", "behaviour", "advantage", "weight", "reference"])
def test_an_input_that_is_not_finite_is_named_unless_masked(bad: float, place: str) -> None:
    values = {name: [0.1] * 5 for name in ("logp", "behaviour", "advantage", "weight", "reference")}
    values[place][2] = bad
    with pytest.raises(NumericsError, match=rf"token 12 .*{place}="):
        evaluate(
            values["logp"], values["behaviour"], values["advantage"], values["weight"],
            reference=values["reference"], first_index=10,
        )  # fmt: skip
    if place != "weight":
        values["weight"][2] = 0.0
        out = evaluate(
            values["logp"], values["behaviour"], values["advantage"], values["weight"],
            reference=values["reference"],
        )  # fmt: skip
        assert out.coefficient[2] == 0
        assert math.isfinite(float(out.loss))


KL_DIRECTIONS = {"k1": "pi_ref", "k2": "pi_ref", "k3": "ref_pi"}


@pytest.mark.parametrize("kl", KL_DIRECTIONS)
@pytest.mark.parametrize("lag", [False, True])
def test_the_kl_gradient_is_that_of_the_divergence_it_names(kl: str, lag: bool) -> None:
    """The expectation over all actions of mu, by enumeration, against the exact gradient."""
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.2, 0.6, 0.1], dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    behaviour = (
        torch.log_softmax(torch.tensor([0.9, 0.2, 0.3], dtype=torch.float64), 0) if lag else logp.detach()
    )
    # Every action once, weighted by how often mu takes it.
    out = evaluate(
        logp.detach(), behaviour, torch.zeros(3), behaviour.exp(), reference=reference,
        objective=Objective(kl=kl, kl_coef=1.0),
    )  # fmt: skip
    (expected_logits,) = torch.autograd.grad(logp, logits, out.coefficient, retain_graph=True)
    if KL_DIRECTIONS[kl] == "pi_ref":
        divergence = (logp.exp() * (logp - reference)).sum()
    else:
        divergence = (reference.exp() * (reference - logp)).sum()
    (exact,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(expected_logits, exact, rtol=0, atol=1e-12)
    if kl != "k2":
        value = (logp.exp() * (logp - reference)).sum()
        assert float(out.loss) == pytest.approx(
            float(value.detach()), abs=1e-12
        )  # both estimate KL(pi || ref)


def test_entropy_bonus_and_its_statistic() -> None:
    out = evaluate(
        [0.0, 0.0],
        [0.0, 0.0],
        [0.0, 0.0],
        [1.0, 0.0],
        entropy=[2.0, 99.0],
        objective=Objective(entropy_coef=0.1),
    )
    assert float(out.loss) == pytest.approx(-0.2)
    assert out.stats.entropy == 2.0
    assert not out.coefficient.any()
    with pytest.raises(ShapeError, match="entropy"):
        evaluate([0.0], [0.0], [0.0], objective=Objective(entropy_coef=0.1))


def tokens_of(count: int, seed: int, *, proximal: bool = False) -> tuple[Tensor, Tensor, Tokens]:
    """Log-probs, entropies and inputs of packed tokens with masks, an empty segment and one without a weight."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(6, count, generator=generator, dtype=torch.float64)
    logp = -noise[0].abs() - 0.05
    weight = torch.rand(count, generator=generator, dtype=torch.float64)
    weight = torch.where(torch.rand(count, generator=generator) > 0.25, weight / count, 0.0)
    cuts = [0, 1, 1, count // 4, count // 3, count // 2, count - 1, count]
    weight[count // 4 : count // 3] = 0.0
    return (
        logp,
        noise[5].abs(),
        Tokens(
            behaviour=logp + 0.3 * noise[1],
            advantage=noise[2],
            token_weight=weight,
            segments=torch.tensor(cuts),
            reference=logp + 0.4 * noise[3],
            proximal=logp + 0.2 * noise[4] if proximal else None,
        ),
    )


def run_tokens(
    objective: Objective, logp: Tensor, entropy: Tensor, tokens: Tokens, **options: Any
) -> PolicyLoss:
    return policy_loss(
        logp, tokens.behaviour, tokens.advantage, tokens.token_weight, objective=objective,
        segments=tokens.segments, reference=tokens.reference, proximal=tokens.proximal, entropy=entropy, **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", [*OBJECTIVES, *CORRECTED], ids=label)
def test_every_row_of_the_table_has_its_loss_gradient_and_statistics(options: dict[str, Any]) -> None:
    """The cross of objective, correction, level, proximal policy, KL and entropy against fp64 autograd."""
    fields = dict(options)
    use_proximal = fields.pop("proximal", False)
    for kl, entropy_coef in itertools.product(("none", "k1", "k2", "k3"), (0.0, 0.03)):
        objective = Objective(
            **fields, kl=kl, kl_coef=0.0 if kl == "none" else 0.1, entropy_coef=entropy_coef
        )
        logp, entropy, tokens = tokens_of(97, seed=3, proximal=use_proximal)
        leaf = logp.clone().requires_grad_()
        loss = oracle.policy_loss(objective, leaf, entropy, tokens)
        (gradient,) = torch.autograd.grad(loss, leaf)
        out = run_tokens(objective, logp, entropy, tokens)
        torch.testing.assert_close(out.loss, loss.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(out.coefficient, gradient, rtol=1e-11, atol=1e-15)
        assert not out.coefficient[tokens.token_weight == 0].any()
        expected = oracle.statistics(objective, logp, entropy, tokens)
        for name in SUMS:
            assert out.stats.total(name) == pytest.approx(expected[name], rel=1e-10, abs=1e-12), name


def test_every_bound_of_the_table_is_met_by_some_token() -> None:
    """The table-driven test above means something: each statistic of a bound is above 0 and below all."""
    met: dict[str, float] = {}
    for options in [*OBJECTIVES, *CORRECTED]:
        fields = {key: value for key, value in options.items() if key != "proximal"}
        out = run_tokens(Objective(**fields), *tokens_of(97, seed=3, proximal=options.get("proximal", False)))
        for name in (
            "clipped_high",
            "clipped_low",
            "clipped_dual",
            "capped",
            "rejected",
            "segments_rejected",
        ):
            met[name] = max(met.get(name, 0.0), out.stats.total(name))
        if options["name"] in ("dppo_tv", "m2po") or options.get("correction") in ("icepop", "mis"):
            assert 0 < out.stats.total("rejected") < out.stats.num_tokens, options
    assert min(met.values()) > 0, met


def test_a_drift_of_half_a_percent_a_token_rejects_no_sequence_by_its_geometric_mean() -> None:
    """300 tokens at +0.005: product 4.48, geometric mean 1.005; both are reported before the bound."""
    drift = torch.full((300,), 0.005, dtype=torch.float64)
    for level, weight, rejected in (
        ("geometric", 1.00501, 0.0),
        ("sequence", 4.4817, 1.0),
        ("token", 1.00501, 0),
    ):
        objective = Objective("grpo", correction="mis", correction_cap=2.0, correction_level=level)
        out = evaluate(drift, torch.zeros(300), torch.ones(300), objective=objective)
        assert out.stats.weight_mean == pytest.approx(weight, rel=1e-4)
        assert (out.stats.rejected_share, out.stats.segment_rejected_share) == (rejected, rejected)
        assert bool(out.coefficient.any()) == (rejected == 0)
        if rejected:
            assert float(out.loss) == 0.0


def test_a_rejected_sequence_contributes_zero_and_still_counts() -> None:
    """Log r = [.1, -1.5, .8, -10, .3] with tokens 2 to 4 rejected by their ratio: the sum is divided by five."""
    log_ratio = torch.tensor([0.1, -1.5, 0.8, -10.0, 0.3], dtype=torch.float64)
    objective = Objective("grpo", correction="icepop", correction_floor=0.5, correction_cap=2.0)
    out = evaluate(log_ratio, torch.zeros(5), torch.ones(5), [0.2] * 5, objective=objective)
    kept = [math.exp(0.1), math.exp(0.3)]
    np.testing.assert_allclose(out.coefficient, [-kept[0] / 5, 0, 0, 0, -kept[1] / 5])
    assert float(out.loss) == pytest.approx(-sum(kept) / 5)
    assert out.stats.rejected_share == pytest.approx(3 / 5)
    none = evaluate([-9.0, 9.0], [0.0, 0.0], [1.0, -1.0], objective=objective)
    assert (float(none.loss), none.coefficient.tolist(), none.stats.rejected_share) == (0.0, [0.0, 0.0], 1.0)


def test_m2po_masks_the_largest_squares_until_the_mean_is_in_bound() -> None:
    """Equal squares go together; a limit that is given, as for a step of several rows, is taken as it is."""
    log_ratio = torch.tensor([0.1, -0.3, 0.3, 0.2, -1.0], dtype=torch.float64)
    objective = Objective("m2po", m2_bound=0.03)
    out = evaluate(log_ratio, torch.zeros(5), torch.ones(5), objective=objective)
    # mean(.01, .04) = .025; with both .09 it would be .0575.
    assert (out.coefficient != 0).tolist() == [True, False, False, True, False]
    given = evaluate(
        log_ratio, torch.zeros(5), torch.ones(5), objective=objective, m2_limit=torch.tensor(0.0900001)
    )
    assert (given.coefficient != 0).tolist() == [True, True, True, True, False]
    assert evaluate([2.0], [0.0], [1.0], objective=objective).stats.rejected_share == 1.0
    with pytest.raises(UnsupportedOption, match="m2po"):
        evaluate([2.0], [0.0], [1.0], objective=Objective(), m2_limit=torch.tensor(1.0))


def test_dppo_keeps_what_moves_back_and_what_moves_little_in_probability() -> None:
    logp = torch.tensor([0.5, 0.5, 0.01, 0.2, 0.2], dtype=torch.float64).log()
    behaviour = torch.tensor([0.2, 0.2, 0.0001, 0.6, 0.6], dtype=torch.float64).log()
    objective = Objective("dppo_tv", tv_bound=0.1)
    out = evaluate(logp, behaviour, [1.0, -1, 1, -1, 1], objective=objective)
    np.testing.assert_allclose(out.coefficient, [0, 2.5, -100, 0, -1 / 3], rtol=1e-12)


def test_sapo_on_policy_has_the_plain_policy_gradient() -> None:
    out = evaluate([-1.0, -2.0], [-1.0, -2.0], [1.0, -3.0], objective=Objective("sapo"))
    np.testing.assert_allclose(out.coefficient, [-1.0, 3.0], rtol=1e-12)


def test_statistics_count_what_a_kernel_cannot_raise() -> None:
    stats = evaluate([0.0], [0.0], [1.0]).stats
    stats.check()
    stats.sums[SUMS.index("not_finite")] = 2
    with pytest.raises(NumericsError, match="2 tokens"):
        stats.check()


def test_an_objective_passes_through_text() -> None:
    objective = Objective("grpo", correction="icepop", correction_level="sequence", kl="k1", kl_coef=0.1)
    assert Objective.from_text(objective.to_text()) == objective


def random_tokens(count: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logp, behaviour, advantage, reference, entropy = torch.randn(5, count, generator=generator)
    weight = torch.rand(count, generator=generator) * (torch.rand(count, generator=generator) > 0.3)
    return {
        "logp": logp, "behaviour": behaviour, "advantage": advantage, "token_weight": weight,
        "reference": reference, "entropy": entropy,
    }  # fmt: skip


def test_statistics_match_numpy() -> None:
    tokens = random_tokens(5000, seed=1)
    out = policy_loss(**tokens, objective=Objective(cap=1.5), segments=None)
    kept = (tokens["token_weight"] != 0).numpy()
    logp, mu, ref, entropy = (
        tokens[n].double().numpy()[kept] for n in ("logp", "behaviour", "reference", "entropy")
    )
    log_ratio, stats = logp - mu, out.stats
    ratio = np.exp(log_ratio)
    assert stats.num_tokens == kept.sum()
    assert stats.masked_share == pytest.approx(1 - kept.mean())
    assert stats.ratio_mean == pytest.approx(ratio.mean())
    assert stats.weight_mean == pytest.approx(ratio.mean())
    assert stats.ratio_clamped_mean == pytest.approx(np.minimum(ratio, 1.5).mean())
    assert stats.ratio_max == pytest.approx(ratio.max())
    assert stats.log_ratio_max == pytest.approx(np.abs(log_ratio).max())
    assert stats.clip_share == pytest.approx((ratio > 1.5).mean())
    assert stats.ess == pytest.approx(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
    assert stats.kl_behaviour_k1 == pytest.approx((-log_ratio).mean())
    assert stats.kl_behaviour == pytest.approx((ratio - 1 - log_ratio).mean())
    assert stats.kl_reference == pytest.approx(
        (np.minimum(ratio, 1.5) * (np.exp(ref - logp) - 1 + logp - ref)).mean()
    )
    assert stats.entropy == pytest.approx(entropy.mean())
    for share in (0.01, 0.5, 0.9, 0.99):
        exact = np.quantile(ratio, share, method="inverted_cdf")
        assert exact <= stats.ratio_quantile(share) <= exact * math.exp(1 / 16)
    assert stats.ratio_quantile(1.0) == stats.ratio_max
    assert stats.ratio_p99 == stats.ratio_quantile(0.99)


@pytest.mark.parametrize("name", ["cispo", "grpo", "gspo"])
def test_loss_gradient_and_statistics_add_over_any_split(name: str) -> None:
    tokens = random_tokens(600, seed=2)
    objective = Objective(name, kl="k3", kl_coef=0.1, entropy_coef=0.01)
    offsets = torch.tensor([0, 10, 10, 200, 320, 600])
    whole = policy_loss(**tokens, objective=objective, segments=offsets)
    parts = []
    for low, high in ((0, 2), (2, 4), (4, 5)):
        first, last = int(offsets[low]), int(offsets[high])
        part = {key: value[first:last] for key, value in tokens.items()}
        parts.append(policy_loss(**part, objective=objective, segments=offsets[low : high + 1] - first))
    stats = sum((part.stats for part in parts), PolicyStats.zero())
    assert sum(float(part.loss) for part in parts) == pytest.approx(float(whole.loss), rel=1e-12)
    assert torch.equal(torch.cat([part.coefficient for part in parts]), whole.coefficient)
    torch.testing.assert_close(stats.sums, whole.stats.sums, rtol=1e-12, atol=1e-12)
    assert torch.equal(stats.peaks, whole.stats.peaks)
    assert torch.equal(stats.buckets, whole.stats.buckets)
    assert stats.buckets.sum() == stats.num_tokens


def test_statistics_of_nothing_are_neutral() -> None:
    zero = PolicyStats.zero()
    assert (zero.num_tokens, zero.masked_share, zero.clip_share, zero.ess) == (0, 0.0, 0.0, 1.0)
    assert (zero.ratio_mean, zero.ratio_max, zero.ratio_p99, zero.log_ratio_max) == (0.0, 0.0, 0.0, 0.0)
    assert {zero.total(name) for name in SUMS} == {0.0}
    out = evaluate([5.0], [0.0], [1.0], [0.0])
    assert (float(out.loss), out.stats.masked_share, out.stats.ratio_max) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "trpo"}, "cispo, grpo, dapo, dr_grpo, rloo, reinforce_pp, ppo"),
        ({"correction": "vis"}, "none, tis, icepop, mis"),
        ({"name": "grpo", "correction": "tis", "correction_level": "batch"}, "token, sequence, geometric"),
        ({"correction_level": "sequence"}, "no effect"),
        ({"name": "decoupled_ppo"}, "needs a correction"),
        ({"name": "ppo", "correction": "icepop", "correction_floor": 6.0}, "every token would be rejected"),
        ({"name": "sapo", "dual_clip": 2.0}, "no dual clip"),
        ({"name": "sapo", "gate_positive": 0.0}, "gate_positive"),
        ({"name": "dppo_tv", "tv_bound": 1.5}, "tv_bound"),
        ({"name": "m2po", "m2_bound": 0.0}, "m2_bound"),
        ({"name": "m2po", "correction": "tis"}, "count it twice"),
        ({"correction": "tis"}, "count it twice"),
        ({"name": "gspo", "correction": "tis"}, "count it twice"),
        ({"dual_clip": 2.0}, "no dual clip"),
        ({"name": "grpo", "dual_clip": 1.0}, "dual_clip"),
        ({"kl": "abs"}, "k1, k2, k3"),
        ({"kl_coef": 0.1}, "no effect"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": math.inf}, "clip_high"),
        ({"cap": 0.0}, "cap"),
        ({"entropy_coef": math.nan}, "entropy_coef"),
    ],
)
def test_objectives_that_do_not_exist_or_contradict_themselves_are_refused(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedOption, match=words):
        Objective(**fields)


def test_an_objective_is_a_frozen_value() -> None:
    objective = Objective("dapo", clip_high=0.28)
    assert pickle.loads(pickle.dumps(objective)) == objective
    with pytest.raises(AttributeError):
        objective.cap = 3.0  # type: ignore[misc]
