"""Repairs of Triton's interpreter, without which bfloat16 is silently wrong: import this before any kernel.

Importing it sets TRITON_INTERPRET=1, which triton reads when a kernel is decorated, and repairs what triton 3.6 to
3.8 get wrong there:

    tl.dot of bfloat16     multiplies the bit patterns as integers: its operands are widened to fp32 (exactly) first
    fp32 to bfloat16       truncates: rounds to nearest even, as a GPU does
    arithmetic in bfloat16 adds, multiplies, compares and reduces bit patterns: refused; kernels convert to fp32 when
                           they load
    @autotune              asks a GPU driver for its timer: every configuration counts as equally fast
    numpy's warnings       speak of lanes whose value is selected away; silenced, as on a GPU

Raises RuntimeError where triton was imported for compiling already: the two need separate processes.
"""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import os
import sys
from typing import Any

if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
    raise RuntimeError(
        "triton was imported without TRITON_INTERPRET=1: kernels decorated so far are compiled, not interpreted; "
        "import headway_kernels.proof.interpreter first, in a process of its own"
    )
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.autotuner import Autotuner

from headway_kernels.triton import interpreted

_dot = interpreter.InterpreterBuilder.create_dot
_convert = interpreter._convert_float
_binary = interpreter.InterpreterBuilder.binary_op
_QUIET = np.uint16(0x40)


def widen(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The fp32 values of bfloat16 bit patterns (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bfloat16 bit patterns (uint16) of fp32 values: nearest, ties to even; a NaN stays a quiet NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + odd) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), upper | _QUIET, rounded)


def _is_bf16(handle: Any) -> bool:
    return getattr(handle.dtype, "scalar", handle.dtype) == tl.bfloat16


def _repaired_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    sides = [
        interpreter.TensorHandle(widen(side.data), tl.float32) if _is_bf16(side) else side for side in (a, b)
    ]
    return _dot(self, *sides, *rest)


def _repaired_convert(values: Any, source: Any, to: Any, rounding: Any) -> Any:
    if source.scalar == tl.float32 and to.scalar == tl.bfloat16:
        return narrow(np.asarray(values)).reshape(values.shape)
    if source.scalar == tl.bfloat16 and to.scalar == tl.float32:
        return widen(np.asarray(values)).view(np.uint32).reshape(values.shape)
    return _convert(values, source, to, rounding)


def _guarded_binary(self: Any, a: Any, b: Any, operation: Any) -> Any:
    if _is_bf16(a) or _is_bf16(b):
        raise TypeError(
            f"{operation.__name__} in bfloat16 would work on bit patterns in the interpreter; convert with "
            ".to(tl.float32) when loading"
        )
    return _binary(self, a, b, operation)


def _even_timer(_: Any) -> Any:
    def bench(call: Any, quantiles: Any = None) -> tuple[float, ...]:
        call()
        return (1.0,) * len(quantiles or (1,))

    return bench


def install() -> None:
    """Puts the repairs in place; importing the module has done it."""
    interpreter.InterpreterBuilder.create_dot = _repaired_dot
    interpreter.InterpreterBuilder.binary_op = _guarded_binary
    interpreter._convert_float = _repaired_convert
    Autotuner.do_bench = property(_even_timer)
    np.seterr(all="ignore")
    interpreted.mark_repaired()


install()
