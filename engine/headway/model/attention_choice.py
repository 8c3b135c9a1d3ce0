"""Which attention a learner runs with: what the recipe names, or the first of `auto` that can run here.

A back-end that cannot run on this device, in this dtype, or without a package, is refused by name with the reason;
nothing is replaced by something else without a word.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.errors import UnsupportedOption
from headway.model.row_attention import (
    FlexAttention,
    PlanAttention,
    RowAttention,
    VarlenAttention,
    VarlenKernel,
)
from headway_kernels import native

ORDER = ("flash", "varlen", "flex", "native", "sdpa")
"""What `auto` tries, the fastest first. On a CPU the native library is the first that runs."""

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Place:
    """Where attention is to run.

    Attributes:
        device, dtype: of query, key and value; head_dim: D.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device.type}, head size {self.head_dim}"


def choose_attention(name: str, place: Place) -> RowAttention:
    """The back-end of `learner.attention`; its name says which, and the learner tells people at the start.

    Args:
        name: "auto", or one of ORDER.

    Raises:
        UnsupportedOption: it cannot run there; says why, and what can.
    """
    reasons = {other: lacks(other, place) for other in ORDER}
    allowed = [other for other in ORDER if not reasons[other]]
    if name == "auto":
        return _MAKE[allowed[0]]()
    if name not in reasons:
        raise UnsupportedOption(
            f"learner.attention = {name!r}: no such back-end; there are 'auto', {_quoted(ORDER)}"
        )
    if reasons[name]:
        raise UnsupportedOption(
            f"learner.attention = {name!r}: {reasons[name]} (this is {place}); allowed here: 'auto', "
            f"{_quoted(allowed)}"
        )
    return _MAKE[name]()


def lacks(name: str, place: Place) -> str:
    """Why a back-end cannot train there; "" if it can."""
    return _LACKS[name](place)


def _quoted(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _no_native(place: Place) -> str:
    if place.device.type != "cpu" or place.dtype != torch.float32:
        return "the native library computes in float32 on the CPU only"
    return "" if native.library() is not None else f"there is no native library: {native.why_not()}"


def _no_sdpa(_place: Place) -> str:
    return ""


def _no_flex(place: Place) -> str:
    if place.device.type != "cuda":
        return "torch's FlexAttention has no backward pass off a CUDA device"
    return "" if place.head_dim >= 16 else "torch's FlexAttention takes head sizes of 16 and more"


def _no_varlen(place: Place) -> str:
    missing = _no_half_kernel(place)
    if missing:
        return missing
    return (
        "" if _module("torch.nn.attention.varlen") else f"torch {torch.__version__} has no varlen attention"
    )


def _no_flash(place: Place) -> str:
    missing = _no_half_kernel(place)
    if missing:
        return missing
    module = _module("flash_attn")
    if module is None:
        return "the package flash-attn is not installed (pip install 'headway[flash]')"
    version = str(getattr(module, "__version__", "unknown"))
    if not version.startswith("2."):
        return f"flash-attn {version} is installed, headway is written for 2.x"
    return (
        "" if hasattr(module, "flash_attn_varlen_func") else f"flash-attn {version} has no varlen interface"
    )


def _no_half_kernel(place: Place) -> str:
    """What both varlen kernels want."""
    if place.device.type != "cuda":
        return "it runs on CUDA devices only"
    if place.dtype not in HALVES:
        return "it computes in bfloat16 or float16 only; set learner.dtype = 'bfloat16'"
    if place.head_dim % 8 or place.head_dim > 256:
        return "it takes head sizes that are multiples of 8, up to 256"
    capability = torch.cuda.get_device_capability(place.device)
    return "" if capability >= (8, 0) else f"it needs compute capability 8.0, this device has {capability}"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):  # OSError: built for another CUDA
        return None


def flash_kernel() -> VarlenKernel:
    """flash-attn 2.x. Its backward adds in a fixed order, so that a step can be made again."""
    function: Callable[..., Tensor] = importlib.import_module("flash_attn").flash_attn_varlen_func

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        ends: Tensor,
        most: int,
        keys: int,
        scale: float,
    ) -> Tensor:
        return function(
            query, key, value, starts, ends, most, keys, softmax_scale=scale, causal=True, deterministic=True
        )

    return run


def torch_varlen_kernel() -> VarlenKernel:
    """torch's own."""
    function: Callable[..., Any] = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        ends: Tensor,
        most: int,
        keys: int,
        scale: float,
    ) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        return function(
            query, key, value, starts, ends, most, keys, scale=scale, window_size=(-1, 0), enable_gqa=grouped
        )

    return run


def _flex() -> RowAttention:
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    return FlexAttention(torch.compile(module.flex_attention))


_LACKS: dict[str, Callable[[Place], str]] = {
    "flash": _no_flash,
    "varlen": _no_varlen,
    "flex": _no_flex,
    "native": _no_native,
    "sdpa": _no_sdpa,
}
_MAKE: dict[str, Callable[[], RowAttention]] = {
    "flash": lambda: VarlenAttention("flash", flash_kernel()),
    "varlen": lambda: VarlenAttention("varlen", torch_varlen_kernel()),
    "flex": _flex,
    "native": lambda: PlanAttention("native", "cpu"),
    "sdpa": lambda: PlanAttention("sdpa", "reference"),
}
