"""Triton kernels in the interpreter; collected only with TRITON_INTERPRET=1, in a process of its own."""

from __future__ import annotations

import os

collect_ignore_glob: list[str] = []
if os.environ.get("TRITON_INTERPRET") == "1":
    import headway_kernels.proof.interpreter  # noqa: F401  (repairs the interpreter before any kernel is imported)
else:
    collect_ignore_glob.append("test_*.py")
