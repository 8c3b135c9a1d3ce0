"""The device functions for numbers against fp64."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from headway_kernels.triton.numerics import bounded_exp, exp_excess, is_finite, sigmoid, tanh_and_slope

N = 4096


@triton.jit
def evaluate(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    squashed, slope = tanh_and_slope(x)
    tl.store(out_ptr + i, exp_excess(x))
    tl.store(out_ptr + N + i, sigmoid(x))
    tl.store(out_ptr + 2 * N + i, squashed)
    tl.store(out_ptr + 3 * N + i, slope)
    tl.store(out_ptr + 4 * N + i, bounded_exp(x))
    tl.store(out_ptr + 5 * N + i, is_finite(x).to(tl.float32))


def values_at(x: torch.Tensor) -> np.ndarray:
    out = torch.zeros(6, N)
    evaluate[(1,)](x, out, N)
    return out.double().numpy()


def test_functions_keep_their_relative_accuracy_near_zero_and_far_from_it() -> None:
    small = np.geomspace(1e-6, 15, N // 2)
    x = torch.from_numpy(np.concatenate((-small[::-1], small))).float()
    got, exact = values_at(x), x.double().numpy()
    excess = np.where(
        np.abs(exact) < 1e-2, exact**2 / 2 + exact**3 / 6 + exact**4 / 24, np.expm1(exact) - exact
    )
    np.testing.assert_allclose(got[0], excess, rtol=2e-6)
    np.testing.assert_allclose(got[1], 1 / (1 + np.exp(-exact)), rtol=1e-6)
    np.testing.assert_allclose(got[2], np.tanh(exact), rtol=1e-6)
    np.testing.assert_allclose(got[3], 1 / np.cosh(exact) ** 2, rtol=3e-6)
    np.testing.assert_allclose(got[4], np.exp(exact), rtol=3e-6)


def test_exponents_are_bounded_and_a_nan_stays_one() -> None:
    x = torch.zeros(N)
    x[:5] = torch.tensor([1e4, -1e4, torch.inf, -torch.inf, torch.nan])
    got = values_at(x)
    np.testing.assert_allclose(got[4, :4], np.exp([20.0, -20.0, 20.0, -20.0]), rtol=2e-6)
    assert np.isnan(got[4, 4])
    assert got[5, :5].tolist() == [1, 1, 0, 0, 0]
    assert (got[2, :2] == [1, -1]).all()
