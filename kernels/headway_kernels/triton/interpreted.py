"""What kernels run on: Triton's interpreter, its bfloat16 arithmetic repaired or not, or what it compiles for."""

# pyright: basic, reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton

_repaired: list[bool] = []


def is_interpreted() -> bool:
    """TRITON_INTERPRET was set when the kernels were decorated."""
    return bool(triton.knobs.runtime.interpret)


def compiled_architecture() -> int:
    """What triton compiles for: 90 for compute capability 9.0."""
    return int(triton.runtime.driver.active.get_current_target().arch)


def mark_repaired() -> None:
    """What headway_kernels.proof.interpreter calls when it has put its repairs in place."""
    _repaired.append(True)


def bf16_is_repaired() -> bool:
    """bfloat16 may pass through the interpreter."""
    return bool(_repaired)
