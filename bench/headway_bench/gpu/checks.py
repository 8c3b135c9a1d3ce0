"""Correctness on the device of the ops that own no matrix product; each raises AssertionError with what differs.

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway_bench.gpu.context import Context
from headway_kernels import delta_reference, weight_delta
from headway_kernels.cuda.library import library
from headway_kernels.errors import BackendUnavailable
from headway_kernels.objective import Objective
from headway_kernels.pack_cast import PackTable, Part, scale_shape
from headway_kernels.policy_loss import policy_loss
from headway_kernels.policy_stats import SUMS
from headway_kernels.segment_scan import ScanKind, segment_scan

# A row of the table for each formula, with bounds that random tokens fall on both sides of.
OBJECTIVES: tuple[Objective, ...] = (
    Objective("cispo", cap=1.1),
    Objective("grpo", dual_clip=1.3, kl="k3", kl_coef=0.1),
    Objective("dapo", clip_high=0.28, kl="k1", kl_coef=0.1, cap=1.2),
    Objective("gspo", clip_low=0.02, clip_high=0.02),
    Objective("decoupled_ppo", correction="icepop", correction_floor=0.85, correction_cap=1.2),
    Objective("grpo", correction="tis", correction_cap=1.1, correction_level="sequence"),
    Objective("sapo", kl="k2", kl_coef=0.1, entropy_coef=0.01),
    Objective("sapo", correction="mis", correction_cap=1.1, correction_level="geometric"),
    Objective("dppo_tv", tv_bound=0.01),
    Objective("m2po", m2_bound=0.05),
    Objective("vtrace", cap=1.0),
)
SEGMENT_LENGTHS = (0, 1, 31, 33, 700, 0, 1536, 5)
KINDS: tuple[tuple[ScanKind, dict[str, Any]], ...] = (
    ("return", {"gamma": 0.97}),
    ("gae", {"gamma": 0.99, "lam": 0.95}),
    ("vtrace", {"gamma": 0.98, "lam": 0.9, "rho_cap": 1.2, "c_cap": 1.05}),
)


def check_policy_loss(context: Context) -> None:
    """Every formula, and unbounded ratios, on every back-end here against fp64."""
    segments = torch.tensor(np.cumsum([0, *SEGMENT_LENGTHS]))
    for name in context.backends("policy_loss"):
        with failing(context, "policy_loss", name):
            for seed, objective in enumerate(OBJECTIVES):
                inputs = policy_inputs(context, int(segments[-1]), seed)
                if objective.correction == "none":
                    del inputs["proximal"]
                _compare_policy(objective, inputs, segments.to(context.device), name)
            _check_unbounded(context, name)


def policy_inputs(context: Context, num_tokens: int, seed: int) -> dict[str, Tensor]:
    """Random tokens, a fifth of them masked."""
    behaviour = -context.random(num_tokens, seed=seed, scale=1.5).abs()
    kept = context.random(num_tokens, seed=seed + 1) > -0.84
    return {
        "logp": behaviour + context.random(num_tokens, seed=seed + 2, scale=0.25),
        "behaviour": behaviour,
        "advantage": context.random(num_tokens, seed=seed + 3),
        "token_weight": torch.where(kept, context.random(num_tokens, seed=seed + 4).abs() + 0.01, 0.0),
        "reference": behaviour + context.random(num_tokens, seed=seed + 5, scale=0.3),
        "proximal": behaviour + context.random(num_tokens, seed=seed + 6, scale=0.2),
        "entropy": context.random(num_tokens, seed=seed + 7).abs(),
    }


def _compare_policy(objective: Objective, inputs: dict[str, Tensor], segments: Tensor, backend: str) -> None:
    got = policy_loss(**inputs, objective=objective, segments=segments, backend=backend)
    wide: dict[str, Any] = {name: value.double() for name, value in inputs.items()}
    exact = policy_loss(**wide, objective=objective, segments=segments, backend="reference")
    scale = float(exact.coefficient.abs().max())
    close(f"{objective.name}: coefficient", got.coefficient, exact.coefficient, 1e-5, 1e-6 * scale)
    for place, name in enumerate(SUMS):
        close(f"{objective.name}: {name}", got.stats.sums[place], exact.stats.sums[place], 1e-5, 1e-3)
    close(f"{objective.name}: loss", got.loss, exact.loss, 1e-5, 1e-3)
    assert torch.equal(got.stats.buckets.sum(), exact.stats.buckets.sum()), f"{objective.name}: buckets"


def _check_unbounded(context: Context, backend: str) -> None:
    rows = [(-2, -91, 1, 1), (-2, -91, 0, 1), (-2, -91, 1, 0), (-91, -2, -1, 1), (0, 0, 1, 1)]
    columns = torch.tensor(rows, dtype=torch.float32, device=context.device).T.contiguous()
    out = policy_loss(*columns, objective=Objective("grpo"), segments=None, backend=backend)
    assert bool(out.coefficient.isfinite().all()), f"unbounded ratios: {out.coefficient.tolist()}"
    assert out.coefficient[1:3].tolist() == [0, 0], (
        f"masked and zero-advantage tokens: {out.coefficient.tolist()}"
    )


def check_segment_scan(context: Context) -> None:
    """Every kind on every back-end here against fp64; what is masked holds NaN."""
    for name in context.backends("segment_scan"):
        with failing(context, "segment_scan", name):
            for kind, factors in KINDS:
                arguments = scan_inputs(context, SEGMENT_LENGTHS, kind)
                got = segment_scan(kind, **arguments, **factors, backend=name)
                wide = {
                    key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
                    for key, value in arguments.items()
                }
                exact = segment_scan(kind, **wide, **factors, backend="reference")
                for label, mine, other in zip(("advantage", "target"), got, exact, strict=True):
                    close(f"{kind}: {label}", mine, other, 1e-5, 1e-5)


def scan_inputs(context: Context, lengths: tuple[int, ...], kind: str) -> dict[str, Any]:
    """Random packed segments, a third of the tokens passed over; their inputs are NaN."""
    segments = torch.tensor(np.cumsum([0, *lengths]))
    count = int(segments[-1])
    mask = context.random(count, seed=9) > -0.43
    inputs: dict[str, Any] = {
        "rewards": context.random(count, seed=10),
        "values": context.random(count, seed=11),
        "log_ratio": context.random(count, seed=12, scale=0.3) if kind == "vtrace" else None,
    }
    inputs = {
        name: value if value is None else torch.where(mask, value, torch.nan)
        for name, value in inputs.items()
    }
    bootstrap = context.random(len(lengths), seed=13)
    return {**inputs, "segments": segments.to(context.device), "mask": mask, "bootstrap": bootstrap}


def check_weight_delta(context: Context) -> None:
    """The CUDA kernels against numpy, bit for bit, in every format and dtype."""
    if not has_cuda_library(context, "weight_delta"):
        return
    from headway_kernels.cuda import weight_delta as on_cuda

    with failing(context, "weight_delta", "cuda"):
        size = 3 * weight_delta.BLOCK_ELEMENTS + 30_011
        words = torch.from_numpy(
            np.random.default_rng(1).integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for share in (0.0, 0.01, 0.2, 1.0):
                old = torch.empty(size, dtype=dtype)
                weight_delta.cast_and_diff(words, old, backend="reference")
                _flip(old, share)
                # Copies, for on the emulated kernels the device is the CPU and these would be one tensor.
                ours, master = old.to(context.device, copy=True), words.to(context.device)
                got = on_cuda.encode([master], ours, update=True)
                expected = weight_delta.cast_and_diff(words, old.clone(), backend="reference")
                host = got.to_host()
                for field in ("formats", "offsets", "payload"):
                    same = np.array_equal(getattr(host, field), getattr(expected, field))
                    assert same, f"{dtype}, {share} changed: {field} differ"
                restored = old.to(context.device, copy=True)
                on_cuda.apply(got, restored)
                assert _same_bits(restored, ours), f"{dtype}, {share} changed: apply"


def _flip(tensor: Tensor, share: float) -> None:
    bits = torch.from_numpy(delta_reference.bits_of(tensor).view(f"i{tensor.element_size()}"))
    bits[torch.from_numpy(np.random.default_rng(2).random(tensor.numel()) < share)] ^= 1


def check_pack_cast(context: Context) -> None:
    """Casts against numpy bit for bit; fp8 codes and scales against torch."""
    if not has_cuda_library(context, "pack_cast"):
        return
    with failing(context, "pack_cast", "cuda"):
        words = np.random.default_rng(3).integers(0, 2**32, 70_001, dtype=np.uint32)
        source = torch.from_numpy(words.view(np.float32))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            out = torch.empty(source.shape, dtype=dtype, device=context.device)
            PackTable([Part(source.to(context.device), out)], backend="cuda").run()
            expected = delta_reference.cast_bits(words, torch.float32, dtype)
            assert np.array_equal(delta_reference.bits_of(out.cpu()), expected), f"cast to {dtype}"
        values = context.random(300, 260, scale=3.0)
        codes = torch.empty(values.shape, dtype=torch.uint8, device=context.device)
        scales = torch.empty(scale_shape(values, "fp8_block"), device=context.device)
        PackTable([Part(values, codes, "fp8_block", scales)], backend="cuda").run()
        for row in range(0, 300, 128):
            for column in range(0, 260, 128):
                block = values[row : row + 128, column : column + 128]
                expected_codes = (block / (block.abs().max() / 448)).to(torch.float8_e4m3fn)
                got = codes[row : row + 128, column : column + 128]
                assert torch.equal(got, expected_codes.view(torch.uint8)), f"fp8 block {row}, {column}"


def has_cuda_library(context: Context, op: str) -> bool:
    """Whether the CUDA library is here; notes why not."""
    try:
        lib = library()
    except BackendUnavailable as error:
        context.report.note(f"{op} on cuda: not run: {error}")
        return False
    return lib.is_emulated != context.is_cuda


def close(what: str, got: Tensor, exact: Tensor, relative: float, absolute: float | Tensor) -> None:
    """Raises AssertionError with the largest excess where a value is further off than both allow."""
    got, exact = got.double(), exact.double()
    excess = (got - exact).abs() - (absolute + relative * exact.abs())
    same = bool((excess <= 0).all()) and bool(got.isfinite().all())
    if not same:
        place = int(excess.nan_to_num(nan=torch.inf).flatten().argmax())
        raise AssertionError(
            f"{what}: {got.flatten()[place]:.9g}, expected {exact.flatten()[place]:.9g} at {place}"
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    kind = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.view(kind), b.view(kind))


class failing:  # noqa: N801
    """Records a back-end as wrong where a check raises, and goes on with the next."""

    def __init__(self, context: Context, op: str, backend: str) -> None:
        self._context, self._op, self._backend = context, op, backend

    def __enter__(self) -> None:
        """Nothing to set up."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        self._context.synchronize()
        if error is None:
            print(f"  {self._op:<16} {self._backend:<10} ok", flush=True)
            return False
        if not isinstance(error, Exception):
            return False
        self._context.wrong.add((self._op, self._backend))
        self._context.report.note(
            f"WRONG: {self._op}, {self._backend}: {type(error).__name__}: {str(error)[:400]}"
        )
        return True


CHECKS: tuple[Callable[[Context], None], ...] = (
    check_policy_loss,
    check_segment_scan,
    check_weight_delta,
    check_pack_cast,
)


def run(context: Context) -> None:
    """All checks of this module."""
    for check in _in_time(context):
        check(context)


def _in_time(context: Context) -> Iterator[Callable[[Context], None]]:
    for check in CHECKS:
        context.check_time(check.__name__)
        yield check
