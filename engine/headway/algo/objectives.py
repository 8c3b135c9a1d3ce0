"""Objectives by name: the loss, the advantage mode and the denominator that belong together.

    name            advantage      denominator        own bounds
    cispo           batch (any)    tokens (any)       cap 5
    ppo             batch (any)    tokens (any)       clip 0.2 / 0.2
    grpo            group (any)    sequences (any)    clip 0.2 / 0.2
    dapo            group (any)    tokens             clip 0.2 / 0.28
    dr_grpo         mean           constant           clip 0.2 / 0.2
    rloo            loo            tokens (any)       clip 0.2 / 0.2
    reinforce_pp    batch          tokens             clip 0.2 / 0.2
    decoupled_ppo   batch (any)    tokens (any)       clip 0.2 / 0.2, correction tis, proximal lag
    gspo            group (any)    sequences          clip 0.2 / 0.2
    sapo            group (any)    sequences (any)    gates 1.0 / 1.05
    dppo_tv         group (any)    tokens (any)       tv_bound 0.15
    m2po            group (any)    tokens (any)       m2_bound 0.04
    vtrace          batch (any)    tokens (any)       cap 5 (rho-bar; the paper's is 1), trace 1 / 1

The first value is the default; `(any)`: the others may be chosen. What a name's paper fixes stays fixed:
dr_grpo with a standard deviation or a length in its denominator is grpo, and so on. gspo's ratio is
length-normalised and moves little: its paper clips at 3e-4 / 4e-4, at a lag of a fraction of a batch. With
whole updates of lag that rejects most sequences, so the default here is as wide as the others'.

With a correction the ratio is pi/prox. A batch is used for one optimizer step, so the policy that begins the step is
the one that is differentiated:

    proximal = "learner"   prox = sg(pi). The ratio is 1: nothing clips, the weight prox/mu does all the work
    proximal = "lag"       log prox = mu / lag + (1 - 1 / lag) sg(pi) with each token's own lag, prox = sg(pi) at
                           lag 0 (arXiv 2512.06547): the policy one step after mu on the straight line to pi
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from headway.algo.advantages import AdvantageMode
from headway.algo.denominators import Denominator
from headway.config import AlgoConfig
from headway.config.algo_checks import algo_faults, correction_of, proximal_of
from headway.errors import ConfigError, UnsupportedOption
from headway_kernels.objective import AVAILABLE, Objective

# Keys of [algo] that pass to Objective as they are.
_OBJECTIVE_KEYS = tuple(
    field.name
    for field in dataclasses.fields(Objective)
    if field.init and field.name in AlgoConfig.model_fields
)


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """What an optimizer step computes.

    Attributes:
        objective: the loss per token. advantage: from rewards. denominator: of the sum.
        proximal: "learner" or "lag"; see the module's docstring. Read with a correction only.
        trace_lambda, trace_cap: lambda and c-bar of vtrace's trace.
    """

    objective: Objective
    advantage: AdvantageMode
    denominator: Denominator
    proximal: str = "learner"
    trace_lambda: float = 1.0
    trace_cap: float = 1.0

    @property
    def reads_lag(self) -> bool:
        """The loss reads each token's lag."""
        return self.objective.correction != "none" and self.proximal == "lag"

    @property
    def reads_scores(self) -> bool:
        """Inputs of the loss are formed from the learner's own log-probs, so they are computed first."""
        return self.reads_lag or self.objective.name == "vtrace"


# Advantage and denominator where none is chosen.
_DEFAULTS: Mapping[str, tuple[AdvantageMode, Denominator]] = {
    "cispo": (AdvantageMode.BATCH, Denominator.TOKENS),
    "ppo": (AdvantageMode.BATCH, Denominator.TOKENS),
    "grpo": (AdvantageMode.GROUP, Denominator.SEQUENCES),
    "dapo": (AdvantageMode.GROUP, Denominator.TOKENS),
    "dr_grpo": (AdvantageMode.MEAN, Denominator.CONSTANT),
    "rloo": (AdvantageMode.LOO, Denominator.TOKENS),
    "reinforce_pp": (AdvantageMode.BATCH, Denominator.TOKENS),
    "decoupled_ppo": (AdvantageMode.BATCH, Denominator.TOKENS),
    "gspo": (AdvantageMode.GROUP, Denominator.SEQUENCES),
    "sapo": (AdvantageMode.GROUP, Denominator.SEQUENCES),
    "dppo_tv": (AdvantageMode.GROUP, Denominator.TOKENS),
    "m2po": (AdvantageMode.GROUP, Denominator.TOKENS),
    "vtrace": (AdvantageMode.BATCH, Denominator.TOKENS),
}
_CLIP_HIGH = {"dapo": 0.28}


def resolve_recipe(name: str = "cispo", *, path: str = "algo", **chosen: Any) -> Recipe:
    """Fills in a name's defaults and refuses what contradicts it.

    Args:
        name: one of headway_kernels.objective.AVAILABLE.
        chosen: the other keys of [algo] (docs/configuration.md); "" and None take the name's default. A value
            that the loss would not read must be left at its default.
        path: the section's name in error messages.

    Raises:
        ConfigError: every fault at once, each with its path and the values that work.
    """
    if name not in _DEFAULTS:
        raise ConfigError([(f"{path}.objective", f"{name!r} is unknown; choose from {', '.join(AVAILABLE)}")])
    faults = [fault for key, value in chosen.items() if (fault := _choice_fault(key, value))]
    given = {key: "" if value is None and key in _CHOICES else value for key, value in chosen.items()}
    algo = AlgoConfig.model_construct(None, objective=name, **given)
    faults += [] if faults else algo_faults(algo)
    values: dict[str, Any] = {key: getattr(algo, key) for key in _OBJECTIVE_KEYS} | {
        "name": name,
        "correction": correction_of(algo),
        "clip_low": 0.2 if algo.clip_low is None else algo.clip_low,
        "clip_high": _CLIP_HIGH.get(name, 0.2) if algo.clip_high is None else algo.clip_high,
    }
    objective = Objective()
    try:
        objective = Objective(**values)
    except UnsupportedOption as error:
        faults += [] if faults else [("objective", str(error))]
    if faults:
        raise ConfigError([(f"{path}.{key}", message) for key, message in faults])
    advantage, denominator = _DEFAULTS[name]
    return Recipe(
        objective,
        AdvantageMode(algo.advantage or advantage),
        Denominator(algo.denominator or denominator),
        proximal_of(algo),
        algo.trace_lambda,
        algo.trace_cap,
    )


def _choices(key: str) -> tuple[str, ...]:
    return typing.get_args(AlgoConfig.model_fields[key].annotation)


_CHOICES = tuple(
    key
    for key, field in AlgoConfig.model_fields.items()
    if typing.get_origin(field.annotation) is typing.Literal
)


def _choice_fault(key: str, value: object) -> tuple[str, str] | None:
    """A key that does not exist, or a word that its key does not know."""
    if key not in AlgoConfig.model_fields:
        return key, f"is no key of [algo]; choose from {', '.join(AlgoConfig.model_fields)}"
    if key not in _CHOICES or value is None or value in _choices(key):
        return None
    return key, f"{value!r} is unknown; choose from {', '.join(filter(None, _choices(key)))}"
