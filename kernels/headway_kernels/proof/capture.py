"""Compiles what host code launches, for an architecture, without a GPU: the host code runs, its kernels do not.

Between the call of a kernel and its launch stands triton's driver. Here it is a stand-in that names an architecture
and has no device, and launches end after the compilation; so what is compiled is exactly what the host code would
run: its constants, the types, alignment and divisibility of its arguments, its warps and stages.

What the kernels would have written stays unwritten: the host code's results are without meaning.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from headway_kernels.proof.cubin import Usage, read_bytes

WARP = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel that was launched: its usage, with the dynamic shared memory that triton asks for."""

    name: str
    architecture: int
    usage: Usage


class _StandIn:
    """A driver without a device; the architecture serves as the device's index, which keeps compilations apart."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, WARP)

    def get_current_device(self) -> int:
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def capture(architecture: int) -> Iterator[list[Compiled]]:
    """Within, launches compile for the architecture and are listed, each specialisation once.

    Raises:
        RuntimeError: in Triton's interpreter, where nothing is compiled.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set: kernels are interpreted; compile them in a process of its own"
        )
    found: list[Compiled] = []
    seen: set[int] = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            found.append(_measure(kernel, architecture))
        return kernel

    before = driver._active
    driver.set_active(_StandIn(architecture))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = before


def _measure(kernel: Any, architecture: int) -> Compiled:
    (usage,) = read_bytes(kernel.asm["cubin"])
    threads = kernel.metadata.num_warps * WARP
    whole = dataclasses.replace(
        usage, threads=threads, shared_bytes=max(usage.shared_bytes, kernel.metadata.shared)
    )
    return Compiled(kernel.metadata.name, architecture, whole)
