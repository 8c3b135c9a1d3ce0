"""Inputs of the loss that are formed from the learner's own log-probs, which are then computed first.

In: a row's log-probs under the weights that train. Out: advantages (vtrace), proximal log-probs (proximal = "lag"), and
over all rows of a step m2po's limit. Everything is a constant to the gradient.

Legend: T loss tokens of a row (segments are whole trajectories).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.algo.objectives import Recipe
from headway_kernels.policy_reference import second_moment_limit
from headway_kernels.segment_scan import segment_scan


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """What a loss reads of a row besides its log-probs, float32 [T] each; segments: int64 offsets over T.

    Attributes:
        lag: optimizer steps from the weights that sampled each token to those that train on it; None where no
            objective of the run reads it.
    """

    behaviour: Tensor
    advantage: Tensor
    token_weight: Tensor
    segments: Tensor
    lag: Tensor | None


def scored_inputs(recipe: Recipe, logp: Tensor, tokens: TokenInputs) -> tuple[Tensor, Tensor | None]:
    """Advantages and proximal log-probs [T] of a row, for a recipe that reads scores.

    Args:
        logp: float32 [T], of the weights that train.
    """
    advantage, proximal = tokens.advantage, None
    if recipe.objective.name == "vtrace":
        advantage = vtrace_advantage(recipe, logp, tokens)
    if recipe.reads_lag:
        assert tokens.lag is not None, "a recipe with proximal = 'lag' needs the lag of every token"
        proximal = lagged_proximal(logp, tokens.behaviour, tokens.lag)
    return advantage, proximal


def vtrace_advantage(recipe: Recipe, logp: Tensor, tokens: TokenInputs) -> Tensor:
    """V-trace's advantages with the trajectory's own advantage as the reward of its last loss token.

    The baseline is in that advantage already, so the value is 0 at every token and gamma is 1: token i gets
    A c_{i+1} ... c_{n-1} rho_n, the last one A. What was unlikely to go on as it did counts less.
    """
    active = tokens.token_weight != 0
    reward = torch.where(last_of_segment(active, tokens.segments), tokens.advantage, 0.0)
    return segment_scan(
        "vtrace",
        reward,
        tokens.segments,
        values=torch.zeros_like(reward),
        log_ratio=logp - tokens.behaviour,
        mask=active,
        lam=recipe.trace_lambda,
        rho_cap=recipe.objective.cap,
        c_cap=recipe.trace_cap,
    ).advantage


def last_of_segment(active: Tensor, segments: Tensor) -> Tensor:
    """The last active token of every segment, bool [T]."""
    places = active.nonzero()[:, 0]
    member = torch.repeat_interleave(segments.diff())[places]
    ends = torch.ones_like(member, dtype=torch.bool)
    ends[:-1] = member[1:] != member[:-1]
    last = torch.zeros_like(active)
    last[places[ends]] = True
    return last


def lagged_proximal(logp: Tensor, behaviour: Tensor, lag: Tensor) -> Tensor:
    """log prox = mu / lag + (1 - 1 / lag) pi; pi at lag 0 (arXiv 2512.06547)."""
    share = 1.0 / lag.clamp(min=1.0)
    return torch.where(lag > 0, share * behaviour + (1.0 - share) * logp, logp)


def step_m2_limit(recipe: Recipe, rows: Sequence[tuple[Tensor, TokenInputs]]) -> Tensor:
    """m2po's limit over all rows of an optimizer step, float64 scalar.

    Args:
        rows: (logp, tokens) of each.
    """
    log_ratio = torch.cat([logp - tokens.behaviour for logp, tokens in rows])
    active = torch.cat([tokens.token_weight != 0 for _, tokens in rows])
    return second_moment_limit(log_ratio, active, recipe.objective)
