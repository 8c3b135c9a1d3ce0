"""Ops that are bound by memory, as shares of the copy rate measured in this run.

Bytes counted: what the op must read and write once, whatever a kernel reads twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway_bench.gpu.checks import has_cuda_library, policy_inputs
from headway_bench.gpu.context import Context
from headway_bench.gpu.report import middle
from headway_kernels.cuda.library import library
from headway_kernels.objective import Objective
from headway_kernels.pack_cast import PackFormat, PackTable, Part, scale_shape
from headway_kernels.policy_loss import policy_loss
from headway_kernels.segment_scan import segment_scan

ROUNDS = 7
# Smaller calls are bound by launches.
GOAL_SHARE, GOAL_BYTES = 0.8, 256 << 20
# Shares of changed elements: none, what an update of RL changes, where bitmasks pay, everything.
CHANGED = (0.0, 0.01, 0.1, 1.0)
# A layer of an 8B model: q, k, v, o, gate, up, down, two norms.
LAYER = (
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14_336, 4096),
    (14_336, 4096),
    (4096, 14_336),
)
NORMS = ((1, 4096), (1, 4096))
TINY_LAYER = ((40, 64), (16, 64), (64, 100))


def run(context: Context) -> None:
    """weight_delta, pack_cast, segment_scan, policy_loss."""
    for section in (time_weight_delta, time_pack_cast, time_segment_scan, time_policy_loss):
        context.check_time(section.__name__)
        section(context)
        if context.is_cuda:
            torch.cuda.empty_cache()


def time_weight_delta(context: Context) -> None:
    """fp32 to bf16 of a billion elements, by the share that changes: the whole encode, and apply.

    Encode reads master and published (6 bytes) and writes what changed; apply reads the payload and writes values.
    """
    if not _runs(context, "weight_delta"):
        return
    from headway_kernels.cuda import weight_delta as on_cuda

    size = 1 << 30 if context.is_cuda else 1 << 17
    for share in CHANGED:
        master = context.random(size)
        published = master.bfloat16()
        other = _moved(context, master, share)
        turns = cycle((other, master))  # each call changes that share again, back and forth

        def encode(published: Tensor = published, turns: Any = turns) -> object:
            return on_cuda.encode([next(turns)], published, update=True)

        delta = on_cuda.encode([other], master.bfloat16(), update=True)
        written = delta.payload.numel() + 2 * delta.num_changed
        label = f"weight_delta, {share:.0%} changed"
        _add(context, f"{label}: encode", encode, 6 * size + written)
        if delta.num_changed:
            _add(context, f"{label}: apply", partial(on_cuda.apply, delta, published), written)
        del master, published, other, delta, encode, turns


def _moved(context: Context, master: Tensor, share: float) -> Tensor:
    """A copy of which a share moved by 3 %, which is more than a bf16 step."""
    generator = torch.Generator(context.device).manual_seed(50)
    chosen = torch.rand(master.shape, generator=generator, device=context.device) < share
    return torch.where(chosen, master * 1.03, master)


def time_pack_cast(context: Context) -> None:
    """Eight layers of an 8B model in one launch, in every format."""
    if not _runs(context, "pack_cast"):
        return
    shapes = (*LAYER, *NORMS) * 4 if context.is_cuda else TINY_LAYER
    count = sum(rows * columns for rows, columns in shapes)
    wide = context.random(count)
    half = wide.bfloat16()

    def views(flat: Tensor) -> list[Tensor]:
        pieces = flat.split([rows * columns for rows, columns in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    cases: tuple[tuple[str, Tensor, PackFormat], ...] = (
        ("fp32 to bf16", wide, "cast"),
        ("bf16 copied", half, "cast"),
        ("bf16 to fp8, 128 x 128", half, "fp8_block"),
        ("bf16 to fp8, MX", half, "fp8_mx"),
    )
    for label, source, layout in cases:
        dtype = torch.bfloat16 if layout == "cast" else torch.uint8
        target = torch.empty(count, dtype=dtype, device=context.device)
        scale_dtype = torch.float32 if layout == "fp8_block" else torch.uint8
        parts = [
            Part(
                each, out, layout,
                None if layout == "cast"
                else torch.empty(scale_shape(each, layout), dtype=scale_dtype, device=context.device),
            )
            for each, out in zip(views(source), views(target), strict=True)
        ]  # fmt: skip
        table = PackTable(parts, backend="cuda")
        _add(context, f"pack_cast, {label}", table.run, table.num_bytes)


def time_segment_scan(context: Context) -> None:
    """GAE over 64M tokens: long segments through the public op, short ones as the kernel alone.

    Reads rewards, values and mask, writes advantage and target: 17 bytes a token. The public op also checks the
    offsets on the host.
    """
    tokens, length = (1 << 26, 1 << 15) if context.is_cuda else (1 << 12, 1 << 9)
    inputs: dict[str, Any] = {"values": context.random(tokens, seed=60), "gamma": 0.99, "lam": 0.95}
    inputs["mask"] = context.random(tokens, seed=61) > -1.0
    rewards, segments = context.random(tokens, seed=62), torch.arange(0, tokens + 1, length)
    for name in _measured(context, "segment_scan"):
        place = segments if name == "cuda" else segments.to(context.device)
        work = partial(segment_scan, "gae", rewards, place, **inputs, backend=name)
        _add(context, f"segment_scan, segments of {length} / {name}", work, 17 * tokens)
    if not _runs(context, "segment_scan"):
        return
    lengths = np.random.default_rng(1).integers(200, 3800, tokens // 200)
    offsets = np.append(np.unique(np.minimum(np.cumsum(np.insert(lengths, 0, 0)), tokens)), tokens)
    short = torch.from_numpy(np.unique(offsets)).to(context.device)
    outs = torch.empty_like(rewards), torch.empty_like(rewards)
    kernel = partial(
        library().call, "segment_scan", context.device, 1, rewards, short, inputs["values"], None, inputs["mask"],
        None, short.shape[0] - 1, 0.99, 0.95, 1.0, 1.0, *outs,
    )  # fmt: skip
    _add(context, "segment_scan, segments of 200 to 3800 / cuda kernel", kernel, 17 * tokens)


def time_policy_loss(context: Context) -> None:
    """A whole call in microseconds at a step's size, where launches count, and as a rate at four million tokens."""
    for tokens in (16_384, 1 << 22) if context.is_cuda else (300,):
        inputs = policy_inputs(context, tokens, 3)
        for name in ("reference", "proximal", "entropy"):
            del inputs[name]
        for name in _measured(context, "policy_loss"):
            work = partial(policy_loss, **inputs, objective=Objective(), segments=None, backend=name)
            _add(context, f"policy_loss, {tokens} tokens / {name}", work, 20 * tokens, 20)


def _measured(context: Context, op: str) -> list[str]:
    """Back-ends of an op that run here and were right; the reference only where there is no other."""
    names = [name for name in context.backends(op) if (op, name) not in context.wrong]
    return [name for name in names if name != "reference"] or names


def _runs(context: Context, op: str) -> bool:
    return has_cuda_library(context, op) and (op, "cuda") not in context.wrong


def _add(context: Context, case: str, work: Callable[[], object], num_bytes: int, repeats: int = 1) -> None:
    times = context.interleaved({case: work}, 2 if context.is_small else ROUNDS, repeats).get(case, [])
    if not times:
        return
    rates = [num_bytes / each / 1e9 for each in times]
    if context.is_cuda and num_bytes >= GOAL_BYTES:
        share = num_bytes / middle(times) / context.copy_rate
        context.report.goal(
            f"{case}: {share:.0%} of the copy rate, at least {GOAL_SHARE:.0%}", met=share >= GOAL_SHARE
        )
    context.report.add(
        case, "GB/s", rates, config={"bytes": num_bytes, "us": round(1e6 * middle(times), 2)},
        ratios={"share of copy": [1e9 * rate / context.copy_rate for rate in rates]},
    )  # fmt: skip
