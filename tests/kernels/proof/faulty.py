"""Triton kernels with planted faults, which the gate must find, and one without."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sound(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + i), 0))


@triton.jit
def adds_atomically(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(out_ptr, tl.sum(tl.load(x_ptr + i), 0))


@triton.jit
def holds_too_much(x_ptr, out_ptr, ROUNDS: tl.constexpr, N: tl.constexpr):
    """Values that live across a barrier: more of them than there are registers."""
    i = tl.arange(0, N)
    values = tl.load(x_ptr + i)
    for _ in range(ROUNDS):
        tl.debug_barrier()
        values += tl.sum(values, 0)
    tl.store(out_ptr + i, values)


@triton.jit
def multiplies(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    place = i[:, None] * N + i[None, :]
    x = tl.load(x_ptr + place)
    tl.store(out_ptr + place, tl.dot(x, x, input_precision="ieee"))
