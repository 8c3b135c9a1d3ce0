"""The policy loss over tokens: loss, dL/dlogp and statistics in one pass; the objectives are in objective.py.

In: log-probs, advantages and weights of packed tokens. Out: PolicyLoss. head_loss_step calls it for each chunk;
policy_token.py has the formula of a token, policy_reference.py the reference back-end. Never blocks.

Legend: T tokens (packed), S segments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from headway_kernels import registry
from headway_kernels.errors import ShapeError, UnsupportedOption
from headway_kernels.objective import Objective
from headway_kernels.policy_stats import PolicyStats
from headway_kernels.tracing import traceable

PER_TOKEN = ("logp", "behaviour", "advantage", "token_weight", "reference", "proximal", "entropy")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """What policy_loss returns.

    Attributes:
        loss: float64 scalar, sum(token_weight * per-token loss).
        coefficient: float32 [T], dL/dlogp (float64 when logp is); exactly 0 where the weight is 0.
        stats: statistics over the weighted tokens.
    """

    loss: Tensor
    coefficient: Tensor
    stats: PolicyStats


def _ops() -> ModuleType:
    from headway_kernels import policy_ops

    return policy_ops


@traceable(_ops)
def policy_loss(
    logp: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    token_weight: Tensor,
    *,
    objective: Objective,
    segments: Tensor | None,
    reference: Tensor | None = None,
    proximal: Tensor | None = None,
    entropy: Tensor | None = None,
    m2_limit: Tensor | None = None,
    first_index: int = 0,
    backend: str = "auto",
) -> PolicyLoss:
    """Loss, dL/dlogp and statistics of packed tokens.

    Args:
        logp, behaviour: float [T], the learner's and the generator's log-probs of the same tokens, both at the
            sampling temperature. advantage: float [T].
        token_weight: float [T], mask and 1/denominator in one; a token of weight 0 contributes exactly 0,
            whatever its other inputs hold, and is no member of its segment's mean or sum.
        objective: what to compute.
        segments: int64 [S + 1], offsets over the T tokens; read by segment-level objectives only.
        reference: float [T], needed by a KL term; without one it only feeds the statistics.
        proximal: float [T], allowed with a correction only.
        entropy: float [T], needed by an entropy bonus; its gradient is not part of `coefficient`.
        m2_limit: float scalar tensor, for m2po only: tokens whose squared log-ratio is above it are masked.
            None: policy_reference.second_moment_limit of these T tokens.
        first_index: index of the first token in the caller's numbering, for error messages.
        backend: "auto" | "triton" | "cuda" | "cpu" | "reference".

    Raises:
        ShapeError: an input is missing or has another shape.
        UnsupportedOption: an input that the objective has no use for, or an option that the back-end lacks.
        BackendUnavailable: the named back-end cannot run here.
        NumericsError: a weighted token has a NaN or infinite input; names the first index. A back-end on an
            accelerator counts it instead, see PolicyStats.check.
    """
    arguments = dict(locals())
    del arguments["backend"]
    check_policy_inputs(arguments, num_tokens=logp.shape[0])
    if objective.entropy_coef and entropy is None:
        raise ShapeError(f"entropy_coef={objective.entropy_coef} needs the entropy of every token; got None")
    return registry.run("policy_loss", backend, arguments)


def check_policy_inputs(arguments: Mapping[str, Any], num_tokens: int) -> None:
    """Refuses inputs that the objective lacks or has no use for, and wrong shapes.

    Args:
        arguments: of policy_loss or head_loss_step, by name.

    Raises:
        ShapeError: a needed input is None, or is not [num_tokens].
        UnsupportedOption: `proximal` without a correction that uses it, `m2_limit` for another objective.
    """
    objective: Objective = arguments["objective"]
    if arguments["behaviour"] is None:
        raise ShapeError("behaviour log-probs are required: they come from the generator, never recomputed")
    if objective.needs_reference and arguments["reference"] is None:
        raise ShapeError(f"kl={objective.kl!r} needs the reference log-prob of every token; got None")
    if objective.is_segment_level and arguments["segments"] is None:
        raise ShapeError(
            f"objective {objective.name} (correction_level={objective.correction_level!r}) needs the offsets "
            "of the segments; got None"
        )
    if arguments["proximal"] is not None and objective.correction == "none":
        raise UnsupportedOption("proximal log-probs need a correction; got correction='none'")
    limit = arguments["m2_limit"]
    if limit is not None and not objective.needs_m2_limit:
        raise UnsupportedOption(f"m2_limit belongs to objective m2po; got it for {objective.name}")
    if limit is not None and limit.dim() != 0:
        raise ShapeError(f"m2_limit must be a tensor of no dimensions, got {list(limit.shape)}")
    for name in PER_TOKEN:
        tensor = arguments.get(name)
        if tensor is not None and tensor.shape != (num_tokens,):
            raise ShapeError(f"{name} must be [T] = [{num_tokens}], got {list(tensor.shape)}")


def check_segments(segments: Tensor, num_tokens: int) -> list[int]:
    """The offsets as a list.

    Raises:
        ShapeError: they do not rise from 0 to `num_tokens`.
    """
    boundaries: list[int] = segments.tolist()
    if (
        not boundaries
        or boundaries[0] != 0
        or boundaries[-1] != num_tokens
        or sorted(boundaries) != boundaries
    ):
        raise ShapeError(f"segments must rise from 0 to T = {num_tokens}, got {boundaries[:8]}...")
    return boundaries
