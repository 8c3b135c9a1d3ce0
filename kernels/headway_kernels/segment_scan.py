"""Advantages and returns along packed trajectories: GAE, V-trace and discounted returns, one reverse scan each.

Within a segment let 1 .. n be its active tokens (mask True), in order; tokens between them (observations, tool
output, staleness-masked) are passed over: the scan is carried through them, whatever their inputs hold, and their
outputs are exactly 0. A reward belongs on an active token. V_{n+1} = bootstrap of the segment (0 without one).
bexp as in policy_token.py, d = log_ratio.

    "return"  G_i = r_i + gamma G_{i+1}, G_{n+1} = bootstrap
              target = G, advantage = G - V (V = 0 without values)
    "gae"     delta_i = r_i + gamma V_{i+1} - V_i                                      (arXiv 1506.02438)
              a_i = delta_i + gamma lam a_{i+1}, a_{n+1} = 0
              advantage = a, target = a + V
    "vtrace"  rho_i = min(bexp(d_i), rho_cap), c_i = lam min(bexp(d_i), c_cap)         (arXiv 1802.01561)
              delta_i = rho_i (r_i + gamma V_{i+1} - V_i)
              a_i = delta_i + gamma c_i a_{i+1}, a_{n+1} = 0
              target_i = v_i = V_i + a_i, advantage_i = r_i + gamma v_{i+1} - V_i, v_{n+1} = bootstrap
              (objective vtrace multiplies the advantage by min(r, cap))

So every kind is y_i = b_i + f_i y_{i+1} within a segment: b = r, f = gamma; b = delta, f = gamma lam; b = delta,
f = gamma c. An empty segment is allowed. Segments never see each other.

Legend: T tokens (packed), S segments.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headway_kernels import registry
from headway_kernels.errors import ShapeError, UnsupportedOption
from headway_kernels.tracing import traceable

ScanKind = Literal["return", "gae", "vtrace"]
KINDS = ("return", "gae", "vtrace")


class SegmentScan(NamedTuple):
    """float32 [T] each (float64 where rewards are): advantage and target; exactly 0 where not active."""

    advantage: Tensor
    target: Tensor


def _ops() -> ModuleType:
    from headway_kernels import policy_ops

    return policy_ops


@traceable(_ops)
def segment_scan(
    kind: ScanKind,
    rewards: Tensor,
    segments: Tensor,
    *,
    values: Tensor | None = None,
    log_ratio: Tensor | None = None,
    mask: Tensor | None = None,
    bootstrap: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_cap: float = 1.0,
    c_cap: float = 1.0,
    backend: str = "auto",
) -> SegmentScan:
    """Advantages and value targets of packed trajectories; the formulas are in the module's docstring.

    Args:
        kind: "return" | "gae" | "vtrace".
        rewards: float [T]. segments: int64 [S + 1], offsets that rise from 0 to T.
        values: float [T], V of the state before each token; needed by gae and vtrace.
        log_ratio: float [T], pi - mu; needed by vtrace, refused by the others.
        mask: bool [T], the active tokens; None: all.
        bootstrap: float [S], the value after each segment's last token; None: 0 (the trajectory ended).
        gamma, lam: in [0, 1]; lam of gae and vtrace. rho_cap, c_cap: > 0, of vtrace.
        backend: "auto" | "triton" | "cuda" | "cpu" | "reference".

    Raises:
        ShapeError: an input is missing or has another shape or dtype, or offsets that do not cover T.
        UnsupportedOption: an input or a factor that the kind does not read, or that is out of range.
        BackendUnavailable: the named back-end cannot run here.
        NumericsError: an active token has an input that is not finite (found where no host sync is needed;
            else the outputs of its segment before it are NaN).
    """
    arguments = dict(locals())
    del arguments["backend"]
    _check_options(kind, values, log_ratio, gamma, lam, rho_cap, c_cap)
    _check_shapes(rewards, segments, values, log_ratio, mask, bootstrap)
    return registry.run("segment_scan", backend, arguments)


def _check_options(
    kind: str,
    values: Tensor | None,
    log_ratio: Tensor | None,
    gamma: float,
    lam: float,
    rho_cap: float,
    c_cap: float,
) -> None:
    if kind not in KINDS:
        raise UnsupportedOption(f"kind {kind!r} is unknown; choose from {', '.join(KINDS)}")
    if kind != "return" and values is None:
        raise ShapeError(f"kind {kind!r} needs the value of every token; got None")
    if (log_ratio is None) == (kind == "vtrace"):
        raise ShapeError(
            "kind 'vtrace' needs log_ratio, pi - mu of every token, and no other kind reads it; got "
            f"{'None' if log_ratio is None else 'one'} for {kind!r}"
        )
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= factor <= 1.0:
            raise UnsupportedOption(f"{name} must be in [0, 1], got {factor}")
    for name, cap in (("rho_cap", rho_cap), ("c_cap", c_cap)):
        if not cap > 0.0:
            raise UnsupportedOption(f"{name} must be above 0, got {cap}")
        if kind != "vtrace" and cap != 1.0:
            raise UnsupportedOption(f"{name} belongs to kind 'vtrace'; got {cap} for {kind!r}")
    if kind == "return" and lam != 1.0:
        raise UnsupportedOption(f"lam belongs to kinds 'gae' and 'vtrace'; got {lam} for 'return'")


def _check_shapes(
    rewards: Tensor,
    segments: Tensor,
    values: Tensor | None,
    log_ratio: Tensor | None,
    mask: Tensor | None,
    bootstrap: Tensor | None,
) -> None:
    if rewards.dim() != 1 or not rewards.dtype.is_floating_point:
        raise ShapeError(f"rewards must be float [T], got {rewards.dtype} {list(rewards.shape)}")
    if segments.dim() != 1 or segments.dtype != torch.int64 or segments.shape[0] < 1:
        raise ShapeError(f"segments must be int64 [S + 1], got {segments.dtype} {list(segments.shape)}")
    for name, tensor in (("values", values), ("log_ratio", log_ratio), ("mask", mask)):
        if tensor is not None and tensor.shape != rewards.shape:
            raise ShapeError(
                f"{name} must be [T] like rewards {list(rewards.shape)}, got {list(tensor.shape)}"
            )
    if mask is not None and mask.dtype != torch.bool:
        raise ShapeError(f"mask must be bool, got {mask.dtype}")
    if bootstrap is not None and bootstrap.shape != (segments.shape[0] - 1,):
        raise ShapeError(f"bootstrap must be [S] = [{segments.shape[0] - 1}], got {list(bootstrap.shape)}")
