"""head_loss_step and head_logp against their rivals, interleaved, as times, shares of the limit and peak memory.

The limit of a step is three matrix products at the rate measured in this run, that of the log-probs one.

Legend: T rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch

from headway_bench.gpu import rivals
from headway_bench.gpu.context import Context, Work
from headway_bench.gpu.report import Setting, middle, shares
from headway_kernels.head import head_logp, head_loss_step
from headway_kernels.objective import Objective

VOCABULARY = 151_936
# The reference shape, T 16,384 and H 4,096, is early: what the budget leaves out is then the small ones.
SHAPES = ((16_384, 4096), (8192, 4096), (16_384, 2048), (2048, 4096), (8192, 2048), (2048, 2048))
TINY = ((16, 32),)
CHUNK_BYTES = 1 << 30
GOAL_SHAPE, GOAL_MS = (16_384, 4096), 90.0


def run(context: Context) -> None:
    """Every shape, the largest first."""
    if rivals.missing():
        context.report.note(f"rivals not installed, so not measured: {', '.join(rivals.missing())}")
    for tokens, hidden in TINY if context.is_small else SHAPES:
        context.check_time(f"head at T {tokens}, H {hidden} and smaller")
        vocabulary = 257 if context.is_small else VOCABULARY
        rows = make_rows(context, tokens, hidden, vocabulary)
        config: dict[str, Setting] = {"T": tokens, "H": hidden, "V": vocabulary, "dtype": "bfloat16"}
        _measure(context, "head_loss_step", 3, _steps(context, rows), rows, config)
        rows.forget()
        _measure(context, "head_logp", 1, _logps(context, rows), rows, config)
        del rows


def make_rows(context: Context, tokens: int, hidden: int, vocabulary: int) -> rivals.Rows:
    """Random rows in bf16, their behaviour log-probs near those of a random head."""
    x = context.random(tokens, hidden, seed=40, dtype=torch.bfloat16).requires_grad_()
    weight = context.random(
        vocabulary, hidden, seed=41, scale=hidden**-0.5, dtype=torch.bfloat16
    ).requires_grad_()
    generator = torch.Generator(context.device).manual_seed(42)
    target = torch.randint(0, vocabulary, (tokens,), generator=generator, device=context.device)
    behaviour = -12.4 + context.random(tokens, seed=43)
    return rivals.Rows(x, weight, target, behaviour, context.random(tokens, seed=44))


def _steps(context: Context, rows: rivals.Rows) -> dict[str, Work]:
    tokens = rows.x.shape[0]
    ones = torch.ones(tokens, device=context.device)
    contestants: dict[str, Work] = {}
    for name in _own(context, "head_loss_step"):
        grad = torch.zeros(rows.weight.shape, device=context.device)
        contestants[f"headway {name}"] = partial(
            head_loss_step, rows.x.detach(), rows.weight.detach(), rows.target, inv_temperature=ones,
            behaviour=rows.behaviour, advantage=rows.advantage, token_weight=ones / tokens, segments=None,
            objective=Objective(), weight_grad=grad, chunk_bytes=CHUNK_BYTES, want_entropy=True, backend=name,
        )  # fmt: skip
    return {**contestants, **_affordable(context, rows, rivals.steps(rows))}


def _logps(context: Context, rows: rivals.Rows) -> dict[str, Work]:
    ones = torch.ones(rows.x.shape[0], device=context.device)
    contestants: dict[str, Work] = {
        f"headway {name}": partial(
            head_logp, rows.x.detach(), rows.weight.detach(), rows.target, inv_temperature=ones,
            chunk_bytes=CHUNK_BYTES, backend=name,
        )
        for name in _own(context, "head_logp")
    }  # fmt: skip
    return {**contestants, **_affordable(context, rows, rivals.logps(rows))}


def _own(context: Context, op: str) -> list[str]:
    return [name for name in context.backends(op) if (op, name) not in context.wrong]


def _affordable(context: Context, rows: rivals.Rows, found: dict[str, Work]) -> dict[str, Work]:
    if not context.fits(rivals.full_bytes(rows)):
        context.report.note(
            f"{rivals.FULL} at T {rows.x.shape[0]}: left out: {rivals.full_bytes(rows) >> 30} GiB do not fit"
        )
        del found[rivals.FULL]
    return found


def _measure(
    context: Context,
    op: str,
    products: int,
    contestants: dict[str, Work],
    rows: rivals.Rows,
    config: dict[str, Setting],
) -> None:
    (tokens, hidden), vocabulary = rows.x.shape, rows.weight.shape[0]
    case = f"{op} T{tokens} H{hidden}"
    times = context.interleaved(contestants, rounds=2 if context.is_small else 5, label=f"{case} / ")
    limit = products * 2 * tokens * hidden * vocabulary / context.matrix_rate
    own = [name for name in times if name.startswith("headway") and not name.endswith("reference")]
    best = min(own, key=lambda name: middle(times[name]), default=None)
    if best is not None and (op, tokens, hidden) == ("head_loss_step", *GOAL_SHAPE):
        took = 1e3 * middle(times[best])
        context.report.goal(f"{case}: {took:.1f} ms on {best}, at most {GOAL_MS:.0f}", met=took <= GOAL_MS)
    for name, values in times.items():
        ratios = {"share of limit": shares(limit, values)}
        if best is not None and name != best:
            ratios[f"against {best}"] = [mine / ours for mine, ours in zip(values, times[best], strict=True)]
        with context.noting(f"{case} / {name}: peak memory"):
            rows.forget()
            peak = context.peak_bytes(contestants[name]) / 2**20
            context.report.add(
                f"{case} / {name}", "ms", [1e3 * value for value in values],
                config={**config, "peak_mib": round(peak, 1), "limit_ms": round(1e3 * limit, 3)}, ratios=ratios,
            )  # fmt: skip
