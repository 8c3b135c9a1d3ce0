"""Correctness of the head on the device against the fp64 reference; each check's docstring states its bound.

Legend: T rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from headway_bench.gpu.checks import close, failing, policy_inputs
from headway_bench.gpu.context import Context
from headway_kernels.head import head_logp, head_loss_step
from headway_kernels.head_masked import head_masked
from headway_kernels.objective import Objective

# (T, H, V): one column; beside a block of the vocabulary; odd hidden sizes; a real vocabulary.
SHAPES = ((1, 64, 1), (17, 8, 127), (3, 65, 129), (129, 64, 1025), (17, 256, 50_257), (129, 256, 151_936))
TINY = ((1, 8, 1), (3, 9, 129))
OBJECTIVES = (
    Objective("cispo", entropy_coef=0.01),
    Objective("grpo", dual_clip=1.3, kl="k3", kl_coef=0.1),
    Objective("gspo", clip_low=0.02, clip_high=0.02),
)
CHAINS: tuple[dict[str, Any], ...] = ({}, {"softcap": 5.0, "logit_scale": 0.7, "bias": True})


def run(context: Context) -> None:
    """head_logp, head_loss_step and head_masked on every back-end here."""
    for name in context.backends("head_logp"):
        with failing(context, "head_logp", name):
            for shape, dtype, chain in _cases(context):
                _check_logp(name, head_inputs(context, *shape, dtype, chain))
    for name in context.backends("head_loss_step"):
        with failing(context, "head_loss_step", name):
            for shape, dtype, chain in _cases(context):
                for objective in OBJECTIVES if not chain else OBJECTIVES[:1]:
                    _check_step(context, name, objective, head_inputs(context, *shape, dtype, chain))
    for name in context.backends("head_masked"):
        with failing(context, "head_masked", name):
            for dtype in (torch.float32, torch.bfloat16):
                _check_masked(context, name, dtype)


def _cases(context: Context) -> list[tuple[tuple[int, int, int], torch.dtype, dict[str, Any]]]:
    shapes = TINY if context.is_small else SHAPES
    dtypes = (torch.float32, torch.bfloat16)
    return [case for case in itertools.product(shapes, dtypes, CHAINS) if not case[2] or case[0][0] > 1]


def head_inputs(
    context: Context, T: int, H: int, V: int, dtype: torch.dtype, chain: dict[str, Any]
) -> dict[str, Any]:
    """Random rows, temperatures around 1, targets with the first and the last column among them."""
    generator = torch.Generator(context.device).manual_seed(T)
    target = torch.randint(0, V, (T,), generator=generator, device=context.device)
    target[0], target[-1] = V - 1, 0
    out = {
        "x": context.random(T, H, seed=20, dtype=dtype),
        "weight": context.random(V, H, seed=21, scale=2 / H**0.5, dtype=dtype),
        "target": target,
        "inv_temperature": 0.7 + context.random(T, seed=22).abs(),
        **chain,
    }
    if chain.get("bias"):
        out["bias"] = context.random(V, seed=23, scale=0.3, dtype=dtype)
    return out


def _wide(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def _check_logp(backend: str, inputs: dict[str, Any]) -> None:
    """|log-prob - fp64| <= 1e-5 max(1, |z|), logsumexp and entropy the same; bf16 inputs are upcast exactly."""
    got, exact = head_logp(**inputs, backend=backend), head_logp(**_wide(inputs), backend="reference")
    bound = 1e-5 * max(1.0, float(exact.logsumexp.abs().max()))
    for name, mine, other in zip(("logp", "logsumexp", "entropy"), got, exact, strict=True):
        close(f"{_label(inputs)}: {name}", mine, other, 0.0, 2 * bound)


def _check_step(context: Context, backend: str, objective: Objective, inputs: dict[str, Any]) -> None:
    """Gradients to 1e-5 of the largest in fp32, to 2 bf16 ulp of a row's largest in bf16."""
    T, V, H = inputs["x"].shape[0], *inputs["weight"].shape
    policy = policy_inputs(context, T, seed=T)
    del policy["logp"], policy["proximal"], policy["entropy"]
    policy["behaviour"] = head_logp(**inputs, backend="reference").logp + context.random(
        T, seed=30, scale=0.2
    )
    policy["token_weight"][0] = 0.5
    policy["reference"] = policy["behaviour"]
    extra: dict[str, Any] = {
        "objective": objective,
        "segments": torch.tensor([0, T // 2, T], device=context.device),
    }
    outs, grads = [], []
    for wide in (False, True):
        chosen = _wide({**inputs, **policy}) if wide else {**inputs, **policy}
        grad = torch.zeros(V, H, dtype=torch.float64 if wide else torch.float32, device=context.device)
        step = head_loss_step(**chosen, **extra, weight_grad=grad, backend="reference" if wide else backend)
        outs.append(step)
        grads.append(grad)
    label = f"{_label(inputs)}, {objective.name}"
    is_half = inputs["x"].dtype == torch.bfloat16
    for name, mine, exact in (
        ("x_grad", outs[0].x_grad, outs[1].x_grad),
        ("weight_grad", grads[0], grads[1]),
    ):
        largest = exact.abs().amax(1, keepdim=True) if is_half else exact.abs().max()
        # A bf16 ulp is 2^-7 of its number at most. The floor is for rows that are all but zero.
        close(f"{label}: {name}", mine, exact, 0.0, (2 * 2.0**-7 if is_half else 1e-5) * largest + 1e-9)
    close(f"{label}: loss", outs[0].loss, outs[1].loss, 1e-4, 1e-4)


def _check_masked(context: Context, backend: str, dtype: torch.dtype) -> None:
    T, H, V, kept = 9, 64, 1000, 20
    inputs = head_inputs(context, T, H, V, dtype, {})
    generator = torch.Generator(context.device).manual_seed(5)
    ids = torch.rand(T, V, generator=generator, device=context.device).argsort(1)[:, :kept]
    ids[:, 0] = torch.where((ids == inputs["target"][:, None]).any(1), ids[:, 0], inputs["target"])
    sets: dict[str, Any] = {
        "offsets": torch.arange(T + 1, device=context.device) * kept,
        "ids": ids.reshape(-1),
    }
    got = head_masked(**inputs, **sets, backend=backend)
    exact = head_masked(**_wide(inputs), **sets, backend="reference")
    for name, mine, other in zip(("logp", "logsumexp", "entropy"), got, exact, strict=True):
        close(f"{dtype}: kept-set {name}", mine, other, 0.0, 1e-4)


def _label(inputs: dict[str, Any]) -> str:
    V, H = inputs["weight"].shape
    return f"T {inputs['x'].shape[0]}, H {H}, V {V}, {str(inputs['x'].dtype).removeprefix('torch.')}"
