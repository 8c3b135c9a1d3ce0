"""The calls whose kernels run in production: every kernel with its options on and off, at sizes of real models.

And at the sizes that Triton compiles apart: 1 becomes a constant without a type, and what is no multiple of 16 is
loaded piece by piece.

headway_kernels.proof.gate makes these calls with a driver that compiles and launches nothing. A kernel that no call
here launches is not proved, so tests/kernels/proof/test_gate.py compares this list with the kernels that exist.

Legend: T rows or tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway_kernels.objective import Objective
from headway_kernels.proof.bounds import Bound
from headway_kernels.triton.head_logp import triton_head_logp
from headway_kernels.triton.head_masked import triton_head_masked
from headway_kernels.triton.head_step import triton_head_loss_step
from headway_kernels.triton.policy_loss import triton_policy_loss
from headway_kernels.triton.segment_scan import triton_segment_scan

CHUNK_BYTES = 64 << 20

# By kernel. 168 registers let a block of 8 warps run, 128 two of them, 64 four; the GEMM's shared memory is its
# pipeline of tiles.
BOUNDS: dict[str, Bound] = {
    "policy_tokens": Bound(registers=96, shared_kib=4),
    "policy_segments": Bound(registers=168, shared_kib=4),
    "loss_rows": Bound(registers=128, shared_kib=36),
    "score_rows": Bound(registers=128, shared_kib=36),
    "gradient_rows": Bound(registers=128, shared_kib=36),
    "logp_spans": Bound(registers=255, shared_kib=160),
    "logp_merge": Bound(registers=128, shared_kib=36),
    "masked_rows": Bound(registers=128, shared_kib=36),
    "scan_segments": Bound(registers=168, shared_kib=36),
}
# At odd sizes an address a value costs registers: within what a block of 8 warps may have, and no spills.
RAGGED_REGISTERS = 168


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a call, and their name in the table."""

    name: str
    T: int
    V: int
    H: int

    @property
    def segments(self) -> Tensor:
        """int64 [S + 1]: two segments, or one of one token."""
        return torch.tensor(sorted({0, self.T // 2, self.T}))


# T is any; V and H are a model's, H short because host code may run the products.
MODEL = Sizes("", 48, 151_936, 64)
RAGGED = Sizes("odd sizes", 17, 50_257, 65)
SINGLE_ROW = Sizes("one row", 1, 300, 64)
SMALLEST = Sizes("sizes of 1", 1, 1, 1)
# By op, those of these sizes that make a difference to its kernels.
EXTREMES: dict[str, tuple[Sizes, ...]] = {
    "policy_loss": (SMALLEST,),
    "head_loss_step": (RAGGED, SMALLEST),
    "head_logp": (RAGGED, SINGLE_ROW, SMALLEST),
    "head_masked": (RAGGED, SINGLE_ROW, SMALLEST),
    "segment_scan": (SMALLEST,),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of an op's host function.

    Attributes:
        op, label: what it is called in the table. sizes: of its tensors. make: makes it.
        matrix: the kernels' own products must run on tensor cores.
    """

    op: str
    label: str
    sizes: Sizes
    make: Callable[[Sizes], Any]
    matrix: bool = False

    @property
    def name(self) -> str:
        """The label with the sizes' name."""
        return f"{self.label}, {self.sizes.name}" if self.sizes.name else self.label

    def bound(self, kernel: str) -> Bound:
        """What a kernel may use in this call."""
        bound = dataclasses.replace(BOUNDS[kernel], matrix=self.matrix and kernel == "logp_spans")
        if self.sizes is MODEL:
            return bound
        return dataclasses.replace(bound, registers=max(bound.registers, RAGGED_REGISTERS))


def calls() -> list[Call]:
    """Every call of the catalog."""
    listed = [*_policy_calls(), *_head_step_calls(), *_head_logp_calls(), *_masked_calls(), *_scan_calls()]
    return [
        dataclasses.replace(call, sizes=sizes) for call in listed for sizes in (MODEL, *EXTREMES[call.op])
    ]


def _tokens(objective: Objective, sizes: Sizes) -> dict[str, Any]:
    column = torch.zeros(sizes.T)
    return {
        "behaviour": column,
        "advantage": column,
        "token_weight": column,
        "segments": sizes.segments,
        "objective": objective,
        "reference": column if objective.needs_reference else None,
        "proximal": column if objective.correction != "none" else None,
        "m2_limit": torch.zeros(()) if objective.needs_m2_limit else None,
    }


def _policy_calls() -> list[Call]:
    objectives = {
        "cispo": Objective(),
        "grpo, dual clip, tis, k3, entropy": Objective(
            "grpo", dual_clip=3.0, correction="tis", kl="k3", kl_coef=0.1, entropy_coef=0.1
        ),
        "sapo": Objective("sapo"),
        "dppo_tv": Objective("dppo_tv"),
        "m2po": Objective("m2po"),
        "gspo, k3": Objective("gspo", kl="k3", kl_coef=0.1),
        "grpo, icepop by segment": Objective("grpo", correction="icepop", correction_level="geometric"),
    }

    def make(objective: Objective) -> Callable[[Sizes], Any]:
        def call(sizes: Sizes) -> Any:
            column = torch.zeros(sizes.T)
            return triton_policy_loss(column, **_tokens(objective, sizes), entropy=column, first_index=0)

        return call

    return [Call("policy_loss", label, MODEL, make(objective)) for label, objective in objectives.items()]


def _head(sizes: Sizes, dtype: torch.dtype, *, rich: bool) -> dict[str, Any]:
    return {
        "x": torch.zeros(sizes.T, sizes.H, dtype=dtype),
        "weight": torch.zeros(sizes.V, sizes.H, dtype=dtype),
        "target": torch.zeros(sizes.T, dtype=torch.int64),
        "inv_temperature": torch.ones(sizes.T),
        "bias": torch.zeros(sizes.V, dtype=dtype) if rich else None,
        "softcap": 30.0 if rich else None,
        "logit_scale": 0.5 if rich else None,
    }


def _head_step_calls() -> list[Call]:
    rich = Objective("grpo", dual_clip=3.0, correction="tis", kl="k3", kl_coef=0.1, entropy_coef=0.1)

    def call(label: str, dtype: torch.dtype, objective: Objective, *, rich: bool = False) -> Call:
        def make(sizes: Sizes) -> Any:
            return triton_head_loss_step(
                **_head(sizes, dtype, rich=rich), **_tokens(objective, sizes), shard=None,
                weight_grad=torch.zeros(sizes.V, sizes.H), bias_grad=None, chunk_bytes=CHUNK_BYTES, want_entropy=True,
            )  # fmt: skip

        return Call("head_loss_step", label, MODEL, make)

    return [
        call("bf16, cispo", torch.bfloat16, Objective()),
        call("bf16, grpo with everything, bias, softcap", torch.bfloat16, rich, rich=True),
        call("fp32, cispo", torch.float32, Objective()),
        call("bf16, gspo", torch.bfloat16, Objective("gspo")),
        call(
            "bf16, gspo, entropy, bias, softcap",
            torch.bfloat16,
            Objective("gspo", entropy_coef=0.1),
            rich=True,
        ),
    ]


def _head_logp_calls() -> list[Call]:
    def call(label: str, dtype: torch.dtype, *, rich: bool = False, padding: int = 0) -> Call:
        def make(sizes: Sizes) -> Any:
            head = _head(sizes, dtype, rich=rich)
            if padding:  # rows that no descriptor takes
                head["x"] = torch.zeros(sizes.T, sizes.H + padding, dtype=dtype)[:, : sizes.H]
            return triton_head_logp(**head, shard=None, chunk_bytes=CHUNK_BYTES)

        return Call("head_logp", label, MODEL, make, matrix=dtype is not torch.float32)

    return [
        call("bf16", torch.bfloat16),
        call("bf16, bias, softcap", torch.bfloat16, rich=True),
        call("bf16, rows not aligned", torch.bfloat16, padding=1),
        call("fp32", torch.float32),
    ]


def _masked_calls() -> list[Call]:
    def call(label: str, dtype: torch.dtype, *, rich: bool = False) -> Call:
        def make(sizes: Sizes) -> Any:
            offsets, ids = torch.arange(sizes.T + 1) * 20, torch.zeros(sizes.T * 20, dtype=torch.int64)
            return triton_head_masked(
                **_head(sizes, dtype, rich=rich), offsets=offsets, ids=ids, chunk_bytes=CHUNK_BYTES
            )

        return Call("head_masked", label, MODEL, make)

    return [
        call("bf16", torch.bfloat16),
        call("fp32, bias, softcap", torch.float32, rich=True),
    ]


def _scan_calls() -> list[Call]:
    def call(kind: Any, label: str, *, masked: bool) -> Call:
        def make(sizes: Sizes) -> Any:
            column = torch.zeros(sizes.T)
            return triton_segment_scan(
                kind, column, torch.tensor([0, sizes.T]), values=column,
                log_ratio=column if kind == "vtrace" else None,
                mask=torch.ones(sizes.T, dtype=torch.bool) if masked else None, bootstrap=torch.zeros(1),
                gamma=0.99, lam=0.95, rho_cap=1.0, c_cap=1.0,
            )  # fmt: skip

        return Call("segment_scan", label, MODEL, make)

    return [
        call("return", "return", masked=False),
        call("gae", "gae, mask", masked=True),
        call("vtrace", "vtrace, mask", masked=True),
    ]
