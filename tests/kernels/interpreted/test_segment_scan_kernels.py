"""segment_scan in Triton against the definitions written as loops (test_segment_scan.py)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from test_segment_scan import make_data, slow_scan

from headway_kernels.segment_scan import segment_scan
from headway_kernels.triton import segment_scan as kernels

# Empty segments, one token, within a block, exactly a block, and several blocks of 16.
SEGMENTS = [0, 0, 1, 9, 25, 25, 70]
FACTORS: dict[str, dict[str, float]] = {
    "return": {"gamma": 0.9},
    "gae": {"gamma": 0.97, "lam": 0.9},
    "vtrace": {"gamma": 0.97, "lam": 0.9, "rho_cap": 1.2, "c_cap": 0.8},
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks from few tokens: the interpreter's scans are slow."""
    monkeypatch.setattr(kernels, "BLOCK", 16)


def run(kind: Any, data: dict[str, Any], **factors: float) -> tuple[np.ndarray, np.ndarray]:
    out = segment_scan(kind, data["rewards"], data["segments"], backend="triton", **{
        name: data[name] for name in ("values", "log_ratio", "mask", "bootstrap")
    }, **factors)  # fmt: skip
    return out.advantage.double().numpy(), out.target.double().numpy()


@pytest.mark.parametrize(
    ("kind", "masked", "bootstrap"), list(itertools.product(FACTORS, (True, False), (True, False)))
)
def test_scans_are_the_definitions(kind: str, masked: bool, bootstrap: bool) -> None:
    data = make_data(SEGMENTS, seed=3, kind=kind, masked=masked)
    if not bootstrap:
        data["bootstrap"] = None
    for got, want in zip(
        run(kind, data, **FACTORS[kind]), slow_scan(kind, data, **FACTORS[kind]), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_what_a_passed_over_token_holds_reaches_nothing() -> None:
    data = make_data(SEGMENTS, seed=4)
    clean = run("vtrace", data, **FACTORS["vtrace"])
    for name in ("rewards", "values", "log_ratio"):
        data[name][~data["mask"]] = torch.nan
    dirty = run("vtrace", data, **FACTORS["vtrace"])
    assert all(np.array_equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert all((part[~data["mask"].numpy()] == 0).all() for part in clean)


def test_a_segment_never_sees_another() -> None:
    data = make_data(SEGMENTS, seed=5)
    before = run("gae", {**data, "log_ratio": None}, **FACTORS["gae"])
    data["rewards"][9:25] += 100.0
    after = run("gae", {**data, "log_ratio": None}, **FACTORS["gae"])
    outside = np.r_[0:9, 25:70]
    assert all(np.array_equal(a[outside], b[outside]) for a, b in zip(before, after, strict=True))


def test_a_ratio_is_bounded_before_exp_and_a_nan_is_never_hidden() -> None:
    data = make_data([0, 40], seed=6, masked=False)
    data["log_ratio"][20] = 1e4
    assert all(np.isfinite(part).all() for part in run("vtrace", data, rho_cap=1e3, c_cap=2.0))
    data["rewards"][20] = torch.nan
    advantage, target = run("vtrace", data)
    assert np.isnan(target[:21]).all()
    assert np.isfinite(target[21:]).all()
    assert np.isfinite(advantage[21:]).all()


def test_factors_keep_more_digits_than_fp32() -> None:
    """gamma = 0.999 over a thousand tokens: fp32's 0.999 would be off by 3e-5."""
    for factor in (0.999, 0.97, 1.0, 1e-3):
        upper, lower = kernels._split(factor)
        assert upper + lower == pytest.approx(factor, rel=1e-15)
        assert np.float32(upper) == upper
