"""Whether kernels run in Triton's interpreter, and whether its bfloat16 arithmetic was repaired."""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton

_repaired: list[bool] = []


def is_interpreted() -> bool:
    """TRITON_INTERPRET was set when the kernels were decorated."""
    return bool(triton.knobs.runtime.interpret)


def mark_repaired() -> None:
    """What headway_kernels.proof.interpreter calls when it has put its repairs in place."""
    _repaired.append(True)


def bf16_is_repaired() -> bool:
    """bfloat16 may pass through the interpreter."""
    return bool(_repaired)
