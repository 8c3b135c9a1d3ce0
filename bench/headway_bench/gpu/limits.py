"""The limits of this GPU, measured in the same run: how fast it copies, how fast it multiplies."""

from __future__ import annotations

from functools import partial

import torch

from headway_bench.gpu.context import Context
from headway_bench.gpu.report import middle

COPY_BYTES = 4 << 30
SIDE = 8192


def measure(context: Context) -> None:
    """Sets context.copy_rate and context.matrix_rate; random data, medians of 7 and 5."""
    size = COPY_BYTES // 4 if context.is_cuda else 1 << 18
    source, target = context.random(size), torch.empty(size, device=context.device)
    times = context.interleaved({"copy": partial(target.copy_, source)}, 7)["copy"]
    context.copy_rate = 2 * 4 * size / middle(times)
    context.report.add(
        "limit/copy", "GB/s", [2 * 4 * size / each / 1e9 for each in times], config={"bytes": 8 * size}
    )
    del source, target
    side = SIDE if context.is_cuda else 128
    a, b = (context.random(side, side, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    out = torch.empty(side, side, dtype=torch.bfloat16, device=context.device)
    times = context.interleaved({"matrix": partial(torch.matmul, a, b, out=out)}, 5)["matrix"]
    context.matrix_rate = 2 * side**3 / middle(times)
    rates = [2 * side**3 / each / 1e12 for each in times]
    context.report.add("limit/matrix", "TFLOP/s", rates, config={"side": side, "dtype": "bfloat16"})
