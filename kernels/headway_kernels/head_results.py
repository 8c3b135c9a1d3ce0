"""What the head's ops return, and the checks of their inputs. Shared by every back-end.

Legend: T rows (loss tokens), H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from headway_kernels.errors import ShapeError, UnsupportedOption
from headway_kernels.head_shard import VocabShard
from headway_kernels.policy_stats import PolicyStats

CHUNK_BYTES = 64 << 20


class HeadLogp(NamedTuple):
    """Log-prob of the target, logsumexp and entropy; each float32 [T], float64 for float64 inputs."""

    logp: Tensor
    logsumexp: Tensor
    entropy: Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeadLoss:
    """What head_loss_step returns.

    Attributes:
        loss: float64 scalar.
        x_grad: [T, H] in x's dtype, dL/dx, rounded once; exactly 0 on rows without a loss term.
        logp: float32 [T], of the target at its temperature.
        entropy: float32 [T]; None if not wanted.
        stats: statistics over the weighted tokens.
    """

    loss: Tensor
    x_grad: Tensor
    logp: Tensor
    entropy: Tensor | None
    stats: PolicyStats


def compute_dtype(weight: Tensor) -> torch.dtype:
    """float32, or float64 for float64 inputs."""
    return torch.promote_types(weight.dtype, torch.float32)


def check_head(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    inv_temperature: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    shard: VocabShard | None = None,
) -> None:
    """Refuses what no head takes.

    Raises:
        ShapeError: shapes, dtypes, or a target out of range. UnsupportedOption: a softcap of 0 or less.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ShapeError(
            "x must be [T, H] and weight [V, H] of one dtype, got "
            f"{list(x.shape)} {x.dtype} and {list(weight.shape)} {weight.dtype}"
        )
    rows, vocabulary = x.shape[0], weight.shape[0]
    if not x.dtype.is_floating_point or vocabulary == 0:
        raise ShapeError(f"x must be floating point and V at least 1, got {x.dtype} and V = {vocabulary}")
    for name, tensor in (("target", target), ("inv_temperature", inv_temperature)):
        if tensor.shape != (rows,):
            raise ShapeError(f"{name} must be [T] = [{rows}], got {list(tensor.shape)}")
    if target.dtype != torch.int64:
        raise ShapeError(f"target must be int64, got {target.dtype}")
    if bias is not None and bias.shape != (vocabulary,):
        raise ShapeError(f"bias must be [V] = [{vocabulary}], got {list(bias.shape)}")
    if softcap is not None and not softcap > 0:
        raise UnsupportedOption(f"softcap must be above 0, or None for no softcap; got {softcap}")
    if shard is not None:
        shard.check(vocabulary)
        vocabulary = shard.total
    if rows and target.device.type == "cpu":  # elsewhere this would wait for the device
        low, high = target.aminmax()
        if int(low) < 0 or int(high) >= vocabulary:
            raise ShapeError(f"target must be in [0, {vocabulary}), got {int(low)} to {int(high)}")


def check_gradients(
    weight: Tensor, bias: Tensor | None, weight_grad: Tensor | None, bias_grad: Tensor | None
) -> None:
    """Refuses gradient buffers that do not fit.

    Raises:
        ShapeError: shape or dtype (they accumulate in the compute dtype), or a bias_grad without a bias.
    """
    dtype = compute_dtype(weight)
    for name, gradient, value in (("weight_grad", weight_grad, weight), ("bias_grad", bias_grad, bias)):
        if gradient is None:
            continue
        if value is None:
            raise ShapeError(f"{name} was given for a head without a bias; pass None")
        if gradient.shape != value.shape or gradient.dtype != dtype:
            raise ShapeError(
                f"{name} must be {dtype} {list(value.shape)}, got {gradient.dtype} {list(gradient.shape)}"
            )
