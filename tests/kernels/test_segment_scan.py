"""segment_scan against the definitions, written as loops in numpy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from headway_kernels import native
from headway_kernels.errors import NumericsError, ShapeError, UnsupportedOption
from headway_kernels.segment_scan import segment_scan

Array = NDArray[np.float64]
BACKENDS = ("reference", "cpu") if native.available() else ("reference",)


def slow_segment(
    kind: str,
    r: Array,
    v: Array,
    ratio: Array,
    after: float,
    gamma: float,
    lam: float,
    rho_cap: float,
    c_cap: float,
) -> tuple[Array, Array]:
    """One segment's active tokens; sums as the papers write them, no recursion."""
    n = len(r)
    following = np.append(v[1:], after)
    rho, c = np.minimum(ratio, rho_cap), lam * np.minimum(ratio, c_cap)
    if kind == "return":
        target = np.array(
            [sum(gamma ** (k - s) * r[k] for k in range(s, n)) + gamma ** (n - s) * after for s in range(n)]
        )
        return target - v, target
    delta = r + gamma * following - v
    if kind == "gae":
        advantage = np.array(
            [sum((gamma * lam) ** (k - s) * delta[k] for k in range(s, n)) for s in range(n)]
        )
        return advantage, advantage + v
    target = np.array(
        [
            v[s] + sum(gamma ** (k - s) * np.prod(c[s:k]) * rho[k] * delta[k] for k in range(s, n))
            for s in range(n)
        ]
    )
    return r + gamma * np.append(target[1:], after) - v, target


def slow_scan(kind: str, data: dict[str, Any], **factors: float) -> tuple[Array, Array]:
    count = len(data["rewards"])
    advantage, target = np.zeros(count), np.zeros(count)
    options = {"gamma": 1.0, "lam": 1.0, "rho_cap": 1.0, "c_cap": 1.0} | factors
    for index, (low, high) in enumerate(itertools.pairwise(data["segments"].tolist())):
        places = [t for t in range(low, high) if data["mask"] is None or data["mask"][t]]
        if not places:
            continue
        r, v, d = (
            np.zeros(len(places)) if data[name] is None else data[name].double().numpy()[places]
            for name in ("rewards", "values", "log_ratio")
        )
        after = 0.0 if data["bootstrap"] is None else float(data["bootstrap"][index])
        advantage[places], target[places] = slow_segment(kind, r, v, np.exp(d), after, **options)
    return advantage, target


def make_data(
    segments: list[int], seed: int = 0, kind: str = "vtrace", masked: bool = True
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    count = segments[-1]

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return {
        "rewards": normal(count),
        "segments": torch.tensor(segments),
        "values": normal(count),
        "log_ratio": normal(count) if kind == "vtrace" else None,
        "mask": torch.rand(count, generator=generator) > 0.3 if masked else None,
        "bootstrap": normal(len(segments) - 1),
    }


FACTORS: dict[str, tuple[dict[str, float], ...]] = {
    "return": ({}, {"gamma": 0.9}, {"gamma": 0.0}),
    "gae": ({}, {"gamma": 0.9, "lam": 0.8}, {"gamma": 0.9, "lam": 0.0}, {"gamma": 1.0, "lam": 0.95}),
    "vtrace": ({}, {"gamma": 0.9, "lam": 0.8, "rho_cap": 1.5, "c_cap": 0.7}, {"rho_cap": math.inf}),
}
# Lengths around the powers of two at which the doubling scan takes one more sweep, an empty segment in between.
SEGMENTS = ([0], [0, 1], [0, 0, 1, 3, 3], [0, 7, 15, 24], [0, 31, 63, 96, 129], [0, 5, 200])


@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("segments", SEGMENTS, ids=lambda s: str(s[-1]))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kind_is_its_definition(backend: str, kind: Any, segments: list[int], masked: bool) -> None:
    for factors in FACTORS[kind]:
        data = make_data(segments, seed=len(segments), kind=kind, masked=masked)
        advantage, target = slow_scan(kind, data, **factors)
        out = segment_scan(kind, **data, **factors, backend=backend)
        np.testing.assert_allclose(out.advantage.numpy(), advantage, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(out.target.numpy(), target, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["return", "gae", "vtrace"]),
    backend=st.sampled_from(BACKENDS),
)
def test_segments_do_not_see_each_other_nor_masked_tokens(
    lengths: list[int], seed: int, kind: Any, backend: str
) -> None:
    """Each alone gives the same, and NaN in what is masked changes nothing."""
    offsets = np.cumsum([0, *lengths]).tolist()
    data = make_data(offsets, seed, kind)
    factors = {"gamma": 0.9} if kind == "return" else {"gamma": 0.9, "lam": 0.7}
    whole = segment_scan(kind, **data, **factors, backend=backend)
    assert not whole.advantage[~data["mask"]].any()
    assert not whole.target[~data["mask"]].any()
    for name in ("rewards", "values", "log_ratio"):
        if data[name] is not None:
            data[name] = torch.where(data["mask"], data[name], torch.nan)
    for index, (low, high) in enumerate(itertools.pairwise(offsets)):
        part = {name: value if value is None else value[low:high] for name, value in data.items()}
        part |= {"segments": torch.tensor([0, high - low]), "bootstrap": data["bootstrap"][index : index + 1]}
        alone = segment_scan(kind, **part, **factors, backend=backend)
        torch.testing.assert_close(alone.advantage, whole.advantage[low:high], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(alone.target, whole.target[low:high], rtol=1e-12, atol=1e-12)


def test_on_policy_vtrace_is_the_lambda_return() -> None:
    """With rho = c = 1, V-trace's target is GAE's with the same lambda (Espeholt et al., remark 2)."""
    data = make_data([0, 6, 20], kind="gae")
    gae = segment_scan("gae", **data, gamma=0.9, lam=0.8)
    zeros = torch.zeros(20, dtype=torch.float64)
    vtrace = segment_scan("vtrace", **{**data, "log_ratio": zeros}, gamma=0.9, lam=0.8)
    torch.testing.assert_close(vtrace.target, gae.target)


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_ratios_stay_finite_and_outputs_have_the_rewards_precision(backend: str) -> None:
    data = {name: value.float() if name in ("rewards", "values", "log_ratio", "bootstrap") else value
            for name, value in make_data([0, 4]).items()}  # fmt: skip
    data["log_ratio"] = torch.tensor([89.0, -89.0, 1e30, 0.0])
    out = segment_scan("vtrace", **data, rho_cap=2.0, c_cap=2.0, backend=backend)
    assert out.advantage.dtype is out.target.dtype is torch.float32
    assert torch.isfinite(out.advantage).all()
    assert torch.isfinite(out.target).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_rows_agree_with_a_plain_loop(backend: str) -> None:
    data = make_data([0, 30000, 65537], kind="gae")
    out = segment_scan("gae", **data, gamma=0.999, lam=0.97, backend=backend)
    rewards, values, mask = (data[name].tolist() for name in ("rewards", "values", "mask"))
    expected, carry, after = [0.0] * 65537, 0.0, float(data["bootstrap"][1])
    for t in reversed(range(65537)):
        if t == 29999:
            carry, after = 0.0, float(data["bootstrap"][0])
        if mask[t]:
            carry = rewards[t] + 0.999 * after - values[t] + 0.999 * 0.97 * carry
            expected[t], after = carry, values[t]
    torch.testing.assert_close(out.advantage, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.skipif(not native.available(), reason="no native library was built")
@pytest.mark.parametrize("kind", FACTORS)
def test_the_native_scan_is_the_reference_in_fp32_on_any_number_of_threads(kind: Any) -> None:
    """Enough tokens for many pieces of work; bf16 inputs are widened by both."""
    offsets = np.cumsum([0, *np.random.default_rng(5).integers(0, 900, 200)]).tolist()
    factors = FACTORS[kind][-1]
    threads = torch.get_num_threads()
    for dtype in (torch.float32, torch.bfloat16):
        data = {
            name: value.to(dtype) if value is not None and value.dtype == torch.float64 else value
            for name, value in make_data(offsets, 1, kind).items()
        }
        expected = segment_scan(kind, **data, **factors, backend="reference")
        seen = []
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                seen.append(segment_scan(kind, **data, **factors, backend="cpu"))
        finally:
            torch.set_num_threads(threads)
        for ours, again, exact in zip(*seen, expected, strict=True):
            assert ours.dtype == torch.float32
            assert torch.equal(ours, again)
            torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)


GOOD = make_data([0, 3, 5])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"kind": "td"}, UnsupportedOption, "return, gae, vtrace"),
        ({"values": None}, ShapeError, "value of every token"),
        ({"log_ratio": None}, ShapeError, "log_ratio"),
        ({"kind": "gae"}, ShapeError, "no other kind reads it"),
        ({"gamma": 1.5}, UnsupportedOption, "gamma"),
        ({"rho_cap": 0.0}, UnsupportedOption, "rho_cap"),
        ({"kind": "gae", "log_ratio": None, "c_cap": 2.0}, UnsupportedOption, "belongs to kind 'vtrace'"),
        ({"kind": "return", "log_ratio": None, "lam": 0.5}, UnsupportedOption, "lam belongs"),
        ({"segments": torch.tensor([0, 6, 5])}, ShapeError, "rise from 0 to T"),
        ({"segments": torch.tensor([0, 3, 5], dtype=torch.int32)}, ShapeError, "int64"),
        ({"mask": torch.ones(5)}, ShapeError, "bool"),
        ({"bootstrap": torch.ones(3)}, ShapeError, r"\[S\] = \[2\]"),
        ({"rewards": torch.zeros(4)}, ShapeError, "like rewards"),
        ({"rewards": torch.zeros(5, dtype=torch.int64)}, ShapeError, "float"),
        (
            {"rewards": torch.tensor([0, 0, math.nan, 0, 0]), "mask": None},
            NumericsError,
            "rewards of active token 2",
        ),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_no_scan_takes_is_refused(
    backend: str, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments = {"kind": "vtrace", **GOOD, **changes}
    with pytest.raises(error, match=words):
        segment_scan(**arguments, backend=backend)
