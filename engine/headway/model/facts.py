"""Which kernels compute on the CPU here, so that a replay can tell whether its bits can be the same."""

from __future__ import annotations

from pathlib import Path

import xxhash

from headway_kernels import native


def kernel_facts() -> str:
    """The native library, by the digest of its file, and its instruction sets; or PyTorch alone."""
    library = native.library()
    if library is None:
        return "PyTorch"
    digest = xxhash.xxh3_64_hexdigest(Path(library._name).read_bytes())
    return f"native {digest} for {' '.join(native.instruction_sets())}"
