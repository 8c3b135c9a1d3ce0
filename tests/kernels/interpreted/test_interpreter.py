"""The repairs of Triton's interpreter, and what goes wrong without them."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_kernels.proof.interpreter import narrow, widen

PROGRAM = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = {paths!r}
import torch, triton, triton.language as tl
{body}
"""

DOT = """
@triton.jit
def dot(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    place = i[:, None] * N + i[None, :]
    tl.store(out_ptr + place, tl.dot(tl.load(a_ptr + place), tl.load(b_ptr + place)))

a = torch.full((16, 16), 1.5, dtype=torch.bfloat16)
out = torch.zeros(16, 16)
dot[(1,)](a, a, out, 16)
print(float(out[0, 0]))
"""

REFUSED = """
from headway_kernels.errors import UnsupportedOption
from headway_kernels.head import head_logp
x, one = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(2)
try:
    head_logp(x, x, torch.zeros(2, dtype=torch.int64), inv_temperature=one, backend="triton")
except UnsupportedOption as error:
    print(error)
"""

LATE = """
del os.environ["TRITON_INTERPRET"]
triton.knobs.runtime.interpret = False
try:
    import headway_kernels.proof.interpreter
except RuntimeError as error:
    print(error)
"""


def run(body: str) -> str:
    """What a fresh process without the repairs prints."""
    program = PROGRAM.format(paths=sys.path, body=body)
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:  # a kernel's source is read from its file
        file.write(program)
        file.flush()
        done = subprocess.run(
            [sys.executable, file.name], capture_output=True, text=True, timeout=100, check=False
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_the_repairs_a_bf16_dot_multiplies_bit_patterns() -> None:
    """A10: 16 * 1.5 * 1.5 = 36. If this fails because the dot is right, the interpreter was mended: drop the repair."""
    assert float(run(DOT)) > 1e9


def test_without_the_repairs_a_bf16_kernel_is_refused() -> None:
    """A10: no false green: bf16 cannot pass through an interpreter that computes it wrongly."""
    assert "proof.interpreter" in run(REFUSED)


def test_the_repairs_come_too_late_after_triton_has_compiled() -> None:
    assert "process of its own" in run(LATE)


@triton.jit
def multiply(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    place = i[:, None] * N + i[None, :]
    product = tl.dot(tl.load(a_ptr + place), tl.load(b_ptr + place))
    tl.store(out_ptr + place, product.to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_a_bf16_dot_is_exact_before_it_is_rounded(out_dtype: torch.dtype) -> None:
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    out = torch.zeros(16, 16, dtype=out_dtype)
    multiply[(1,)](a, b, out, 16)
    want = a.double() @ b.double()
    if out_dtype is torch.float32:
        torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(out, (a.float() @ b.float()).bfloat16())


@triton.jit
def add(a_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(a_ptr + i)
    tl.store(out_ptr + i, value + value)


def test_arithmetic_in_bf16_is_refused() -> None:
    one = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="bit patterns"):
        add[(1,)](one, torch.zeros(16, dtype=torch.bfloat16), 16)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=32))
def test_narrowing_rounds_as_torch_does(patterns: list[int]) -> None:
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    got = torch.from_numpy(narrow(values).view(np.int16)).view(torch.bfloat16)
    want = torch.from_numpy(values.copy()).bfloat16()
    nans = want.isnan()
    assert torch.equal(got.isnan(), nans)
    assert torch.equal(got.view(torch.int16)[~nans], want.view(torch.int16)[~nans])


def test_every_bf16_survives_widening_and_ties_go_to_even() -> None:
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    values = widen(every)
    nans = np.isnan(values)
    assert np.array_equal(narrow(values)[~nans], every[~nans])
    assert np.isnan(widen(narrow(values)))[nans].all()
    halfway = (every.astype(np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    finite = np.isfinite(values) & (np.abs(values) < 1e38)
    rounded = narrow(halfway.view(np.float32))[finite]
    assert (rounded & 1 == 0).all()


@triton.autotune(configs=[triton.Config({"B": 16}), triton.Config({"B": 32})], key=["n"])
@triton.jit
def double(a_ptr, out_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out_ptr + i, 2.0 * tl.load(a_ptr + i, mask=i < n), mask=i < n)


def test_a_kernel_with_several_configurations_runs() -> None:
    values, out = torch.arange(40.0), torch.zeros(40)
    double[lambda meta: (triton.cdiv(40, meta["B"]),)](values, out, 40)
    assert torch.equal(out, 2 * values)
