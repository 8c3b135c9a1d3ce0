"""What a kernel may use on an architecture, what it breaks, and how many of its warps fit a multiprocessor.

Counts differ by the compiler's version: bounds, not equality.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headway_kernels.proof.cubin import Usage

KIB = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Multiprocessor:
    """The limits of one streaming multiprocessor (CUDA programming guide, compute capabilities)."""

    registers: int
    warps: int
    blocks: int
    shared_bytes: int
    block_shared_bytes: int


ARCHITECTURES: Mapping[int, Multiprocessor] = {
    80: Multiprocessor(65536, 64, 32, 164 * KIB, 163 * KIB),
    90: Multiprocessor(65536, 64, 32, 228 * KIB, 227 * KIB),
    100: Multiprocessor(65536, 64, 32, 228 * KIB, 227 * KIB),
}
WARP = 32
# Registers are allotted to warps in units of 256; each block pays 1 KiB of shared memory to the system from sm_80 on.
REGISTER_UNIT, SYSTEM_SHARED_BYTES = 256, KIB


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """What a kernel may use.

    Attributes:
        registers: per thread. shared_kib: per block.
        atomics: they are allowed (a kernel that reduces nothing). matrix: tensor-core instructions are required.
    """

    registers: int
    shared_kib: int
    atomics: bool = False
    matrix: bool = False

    def broken(self, usage: Usage, architecture: int) -> list[str]:
        """What of it the kernel breaks; an empty list is the proof."""
        limit = min(self.shared_kib * KIB, ARCHITECTURES[architecture].block_shared_bytes)
        found: list[str] = []
        if usage.spills or usage.stack_bytes:
            found.append(
                f"{usage.spills} local loads and stores, {usage.stack_bytes} bytes of stack; allowed: none"
            )
        if usage.registers > self.registers:
            found.append(f"{usage.registers} registers; allowed: {self.registers}")
        if usage.shared_bytes > limit:
            found.append(f"{usage.shared_bytes} bytes of shared memory; allowed: {limit}")
        if usage.atomics and not self.atomics:
            found.append(f"{usage.atomics} atomic instructions; allowed in a reduction: none")
        if self.matrix and not usage.matrix:
            found.append("no tensor-core instruction; its product must have some")
        return found


def occupancy(usage: Usage, architecture: int) -> float:
    """The share of a multiprocessor's warps that the kernel's blocks can fill."""
    limits = ARCHITECTURES[architecture]
    warps = -(-usage.threads // WARP)
    per_warp = -(-usage.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = limits.registers // per_warp // warps
    by_shared = limits.shared_bytes // (usage.shared_bytes + SYSTEM_SHARED_BYTES)
    return min(limits.blocks, limits.warps // warps, by_registers, by_shared) * warps / limits.warps
