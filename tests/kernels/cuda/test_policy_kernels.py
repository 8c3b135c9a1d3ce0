"""policy_loss on the CUDA kernel against the fp64 reference: every row of the table, statistics included."""

from __future__ import annotations

import itertools
import math
from typing import Any

import policy_oracle
import pytest
import torch

from headway_kernels.errors import NumericsError, UnsupportedOption
from headway_kernels.objective import Objective
from headway_kernels.policy_loss import PolicyLoss, policy_loss
from headway_kernels.policy_stats import SUMS

pytestmark = pytest.mark.cuda_emulated

COUNTS = {"tokens", "weighted", "clipped_high", "clipped_low", "clipped_dual", "capped", "rejected", "limited"} | {
    "segments", "segments_limited", "segments_rejected", "not_finite"
}  # fmt: skip
# Not a multiple of a block's 256 threads; two tiles of 1024 tokens; an empty segment and one of masked tokens.
SEGMENTS = (0, 1, 1, 300, 301, 310, 1100, 1283)
TERMS: tuple[dict[str, Any], ...] = (
    {},
    {"kl": "k1", "kl_coef": 0.3, "cap": 1.2},
    {"kl": "k2", "kl_coef": 0.2},
    {"kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.01},
)
ROWS = [*policy_oracle.OBJECTIVES, *policy_oracle.CORRECTED]


def tokens(seed: int, count: int = SEGMENTS[-1]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(count, generator=generator) * scale

    behaviour = -normal(1.5).abs()
    weight = torch.rand(count, generator=generator) * (torch.rand(count, generator=generator) < 0.8)
    if count > 310:
        weight[301:310] = 0
    return {
        "logp": behaviour + normal(0.25),
        "behaviour": behaviour,
        "advantage": normal(1.0),
        "token_weight": weight,
        "reference": behaviour + normal(0.3),
        "proximal": behaviour + normal(0.2),
        "entropy": normal(1.0).abs(),
    }


def both(
    objective: Objective, inputs: dict[str, Any], segments: Any = SEGMENTS
) -> tuple[PolicyLoss, PolicyLoss]:
    offsets = torch.tensor(segments)
    wide = {name: value.double() for name, value in inputs.items()}
    return (
        policy_loss(**inputs, objective=objective, segments=offsets, backend="cuda"),
        policy_loss(**wide, objective=objective, segments=offsets, backend="reference"),
    )


def assert_close(got: PolicyLoss, exact: PolicyLoss) -> None:
    scale = max(exact.coefficient.abs().tolist(), default=0.0)
    torch.testing.assert_close(got.coefficient.double(), exact.coefficient, rtol=1e-5, atol=1e-6 * scale)
    assert torch.equal(got.coefficient == 0, exact.coefficient == 0)
    for index, name in enumerate(SUMS):
        mine, other = float(got.stats.sums[index]), float(exact.stats.sums[index])
        assert mine == other if name in COUNTS else mine == pytest.approx(other, rel=1e-5, abs=1e-4), name
    assert float(got.loss) == pytest.approx(float(exact.loss), rel=1e-5, abs=1e-4)
    torch.testing.assert_close(got.stats.peaks, exact.stats.peaks, rtol=1e-6, atol=1e-6)
    assert torch.equal(got.stats.buckets, exact.stats.buckets)


@pytest.mark.parametrize("row", range(len(ROWS)), ids=[policy_oracle.label(row) for row in ROWS])
def test_every_row_of_the_table_equals_fp64(row: int) -> None:
    options = dict(ROWS[row])
    with_proximal = options.pop("proximal", False)
    inputs = tokens(row)
    if not with_proximal:
        del inputs["proximal"]
    term = TERMS[row % len(TERMS)]
    assert_close(*both(Objective(**{**options, **term}), inputs))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize(("name", "term"), list(itertools.product(["cispo", "gspo"], TERMS)))
def test_every_kl_and_entropy_term_in_any_order_of_threads(name: str, term: dict[str, Any]) -> None:
    inputs = tokens(5)
    del inputs["proximal"]
    assert_close(*both(Objective(**{"name": name, **term}), inputs))


def test_the_result_does_not_depend_on_the_order_of_threads_and_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = tokens(6)
    del inputs["proximal"]
    seen = []
    for seed in ("0", "1", "2"):
        monkeypatch.setenv("HEADWAY_EMULATOR_SEED", seed)
        out = policy_loss(**inputs, objective=Objective(), segments=None, backend="cuda")
        seen.append(torch.cat((out.loss[None], out.stats.sums, out.stats.peaks, out.coefficient.double())))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("name", ["cispo", "grpo", "gspo", "sapo", "dppo_tv", "m2po", "vtrace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unbounded_ratios_stay_finite(name: str, dtype: torch.dtype) -> None:
    """A1: (pi, mu, advantage, weight), with a masked token that contributes exactly 0."""
    rows = [(-2, -91, 1, 1), (-2, -91, 0, 1), (-2, -91, 1, 0), (-91, -2, -1, 1), (0, 0, 1, 1)]
    rows += [(-2, -91, -1, 1), (-2, -1024, -1, 1)]
    names = ("logp", "behaviour", "advantage", "token_weight")
    inputs = dict(zip(names, torch.tensor(rows, dtype=dtype).T, strict=True))
    got, exact = both(Objective(name), inputs, range(8))
    assert_close(got, exact)
    assert math.isfinite(float(got.loss))
    assert got.coefficient[1:3].tolist() == [0, 0]
    assert got.stats.log_ratio_max == 1022  # the raw one, not the clamped


def test_the_guard_changes_no_bit_of_a_moderate_ratio() -> None:
    """A1: |log r| <= 20 gives the same bits with a far token beside it and without."""
    logp = torch.linspace(-20, 20, 101)
    alone = policy_loss(
        logp, torch.zeros(101), torch.ones(101), torch.ones(101), objective=Objective(cap=1e9), segments=None,
        backend="cuda",
    )  # fmt: skip
    far = torch.cat((logp, torch.tensor([300.0])))
    beside = policy_loss(
        far, torch.zeros(102), torch.ones(102), torch.ones(102), objective=Objective(cap=1e9), segments=None,
        backend="cuda",
    )  # fmt: skip
    assert torch.equal(alone.coefficient, beside.coefficient[:101])
    torch.testing.assert_close(-alone.coefficient, logp.exp(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logp", "behaviour", "advantage", "reference", "entropy"])
def test_an_input_that_is_not_finite_is_counted_and_not_hidden(name: str, bad: float) -> None:
    inputs = tokens(7, 300)
    del inputs["proximal"]
    inputs["token_weight"][:] = 1
    inputs["token_weight"][9] = 0
    inputs[name][[3, 9]] = bad  # the second is masked
    out = policy_loss(**inputs, objective=Objective("grpo"), segments=None, backend="cuda")
    assert out.coefficient.isnan().nonzero().flatten().tolist() == [3]
    assert math.isnan(float(out.loss))
    assert out.coefficient[9] == 0
    assert (out.stats.total("not_finite"), out.stats.total("weighted")) == (1, 299)
    with pytest.raises(NumericsError, match="1 tokens"):
        out.stats.check()


def test_a_small_coefficient_is_not_erased() -> None:
    """A6: a ratio a hair from 1 and a tiny weight keep their digits."""
    logp = torch.tensor([-5e-4, -1e-6])
    inputs = {
        "logp": logp, "behaviour": torch.zeros(2), "advantage": torch.full((2,), -1.0),
        "token_weight": torch.full((2,), 5e-4),
    }  # fmt: skip
    got, exact = both(Objective("sapo"), inputs, [0, 2])
    torch.testing.assert_close(got.coefficient.double(), exact.coefficient, rtol=1e-6, atol=0)
    assert got.coefficient[0] != got.coefficient[1]


@pytest.mark.parametrize("masked", [True, False])
def test_no_tokens_and_no_weighted_tokens_have_neutral_statistics(masked: bool) -> None:
    empty = torch.zeros(3 if masked else 0)
    for objective in (Objective(), Objective("gspo")):
        inputs = dict.fromkeys(("logp", "behaviour", "advantage", "token_weight"), empty)
        assert_close(*both(objective, inputs, [0, empty.shape[0]]))


def test_m2_takes_a_given_limit() -> None:
    inputs = tokens(8, 100)
    del inputs["proximal"]
    limit = torch.tensor(0.01, dtype=torch.float64)
    got = policy_loss(**inputs, objective=Objective("m2po"), segments=None, m2_limit=limit, backend="cuda")
    squares = (inputs["logp"].double() - inputs["behaviour"].double()).square()
    assert got.stats.total("rejected") == ((squares > limit) & (inputs["token_weight"] != 0)).sum()


def test_double_precision_is_refused() -> None:
    wide = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(UnsupportedOption, match=r"compute in fp32, and logp is torch\.float64"):
        policy_loss(wide, wide, wide, wide, objective=Objective(), segments=None, backend="cuda")
