"""Objectives by name: the loss, the advantage mode and the denominator that belong together.

    name            advantage        denominator              clip_low / clip_high
    cispo           batch (any)      tokens (any)             -    / -      cap 5
    grpo            group (any)      sequences (any)          0.2  / 0.2
    dapo            group (any)      tokens                   0.2  / 0.28
    dr_grpo         mean             constant                 0.2  / 0.2
    rloo            loo              tokens (any)             0.2  / 0.2
    reinforce_pp    batch            tokens                   0.2  / 0.2
    ppo             batch (any)      tokens (any)             0.2  / 0.2
    decoupled_ppo   batch (any)      tokens (any)             0.2  / 0.2    correction tis
    gspo            group (any)      sequences                0.2  / 0.2
    sapo            group (any)      sequences (any)          gates 1.0 / 1.05
    dppo_tv         group (any)      tokens (any)             tv_bound 0.15
    m2po            group (any)      tokens (any)             m2_bound 0.04
    vtrace          batch (any)      tokens (any)             cap 5 (the paper's rho-bar: 1)

The first value is the default; `(any)`: the others may be chosen. What a name's paper fixes stays fixed:
dr_grpo with a standard deviation or a length in its denominator is grpo, and so on. gspo's ratio is
length-normalised and moves little: its paper clips at 3e-4 / 4e-4, at a lag of a fraction of a batch. With
whole updates of lag that rejects most sequences, so the default here is as wide as the others'.

decoupled_ppo takes prox = sg(pi): a batch is used for one optimizer step, so the policy that begins the step is
the one that is differentiated, and what acts is the weight prox/mu.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headway.algo.advantages import AdvantageMode
from headway.algo.denominators import Denominator
from headway.errors import ConfigError, UnsupportedOption
from headway_kernels.objective import AVAILABLE, CORRECTIONS, KL_ESTIMATORS, Objective

_ADVANTAGES = tuple(AdvantageMode)
_DENOMINATORS = tuple(Denominator)
_UNUSED = Objective()  # the values that mean "not chosen" where a key has no effect


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """What an optimizer step computes.

    Attributes:
        objective: the loss per token. advantage: from rewards. denominator: of the sum.
    """

    objective: Objective
    advantage: AdvantageMode
    denominator: Denominator


@dataclasses.dataclass(frozen=True, slots=True)
class _Family:
    """The defaults (first) and the other allowed values of a name."""

    advantages: tuple[AdvantageMode, ...]
    denominators: tuple[Denominator, ...]
    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: str = "none"


def _first(value: AdvantageMode) -> tuple[AdvantageMode, ...]:
    return (value, *(mode for mode in _ADVANTAGES if mode is not value))


_ANY = _first(AdvantageMode.BATCH)
_BY_GROUP = _first(AdvantageMode.GROUP)
_BY_SEQUENCE = (Denominator.SEQUENCES, Denominator.TOKENS, Denominator.CONSTANT)
_FAMILIES: Mapping[str, _Family] = {
    "cispo": _Family(_ANY, _DENOMINATORS),
    "grpo": _Family(_BY_GROUP, _BY_SEQUENCE),
    "dapo": _Family(_BY_GROUP, (Denominator.TOKENS,), clip_high=0.28),
    "dr_grpo": _Family((AdvantageMode.MEAN,), (Denominator.CONSTANT,)),
    "rloo": _Family((AdvantageMode.LOO,), _DENOMINATORS),
    "reinforce_pp": _Family((AdvantageMode.BATCH,), (Denominator.TOKENS,)),
    "ppo": _Family(_ANY, _DENOMINATORS),
    "decoupled_ppo": _Family(_ANY, _DENOMINATORS, correction="tis"),
    "gspo": _Family(_BY_GROUP, (Denominator.SEQUENCES,)),
    "sapo": _Family(_BY_GROUP, _BY_SEQUENCE),
    "dppo_tv": _Family(_BY_GROUP, _DENOMINATORS),
    "m2po": _Family(_BY_GROUP, _DENOMINATORS),
    "vtrace": _Family(_ANY, _DENOMINATORS),
}


def resolve_recipe(
    name: str = "cispo",
    *,
    advantage: str | None = None,
    denominator: str | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    cap: float = 5.0,
    correction: str | None = None,
    correction_cap: float = 5.0,
    kl: str = "none",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    path: str = "algo",
) -> Recipe:
    """Fills in a name's defaults and refuses what contradicts it.

    Args:
        name: one of headway_kernels.objective.AVAILABLE.
        advantage, denominator: None or "" take the name's default.
        clip_low, clip_high: None takes the name's default.
        dual_clip, cap, correction, correction_cap, kl, kl_coef, entropy_coef: see Objective. A value that the
            loss would not read must be left at its default.
        path: the section's name in error messages.

    Returns:
        Recipe.

    Raises:
        ConfigError: every fault at once, each with its path and the values that work.
    """
    family = _FAMILIES.get(name)
    if family is None:
        raise ConfigError([(f"{path}.objective", f"{name!r} is unknown; choose from {', '.join(AVAILABLE)}")])
    correction = correction or family.correction
    faults: list[tuple[str, str]] = []
    for key, value, choices in (("correction", correction, CORRECTIONS), ("kl", kl, KL_ESTIMATORS)):
        if value not in choices:
            faults.append((key, f"{value!r} is unknown; choose from {', '.join(choices)}"))
    faults += _chosen_faults(name, "advantage", advantage, family.advantages, _ADVANTAGES)
    faults += _chosen_faults(name, "denominator", denominator, family.denominators, _DENOMINATORS)
    if not faults:
        chosen = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
        numbers = {"cap": cap, "correction_cap": correction_cap, "kl_coef": kl_coef}
        faults = _unused_faults(name, correction, kl, chosen, numbers)
    objective = Objective()
    try:
        objective = Objective(
            name=name,
            clip_low=family.clip_low if clip_low is None else clip_low,
            clip_high=family.clip_high if clip_high is None else clip_high,
            dual_clip=dual_clip,
            cap=cap,
            correction=correction,
            correction_cap=correction_cap,
            kl=kl,
            kl_coef=kl_coef,
            entropy_coef=entropy_coef,
        )
    except UnsupportedOption as error:
        if not faults:
            faults.append(("objective", str(error)))
    if faults:
        raise ConfigError([(f"{path}.{key}", message) for key, message in faults])
    return Recipe(
        objective,
        AdvantageMode(advantage) if advantage else family.advantages[0],
        Denominator(denominator) if denominator else family.denominators[0],
    )


def _chosen_faults(
    name: str, key: str, value: str | None, allowed: tuple[str, ...], known: tuple[str, ...]
) -> list[tuple[str, str]]:
    if not value or value in allowed:
        return []
    if value not in known:
        return [(key, f"{value!r} is unknown; choose from {', '.join(allowed)}")]
    return [(key, f"{value!r} contradicts objective {name!r}, which allows {', '.join(allowed)}")]


def _unused_faults(
    name: str,
    correction: str,
    kl: str,
    chosen: Mapping[str, float | None],
    numbers: Mapping[str, float],
) -> list[tuple[str, str]]:
    """Values that the loss would never read."""
    faults: list[tuple[str, str]] = []
    if name == "cispo":
        faults += [
            (key, f"objective 'cispo' does not clip, so {value} has no effect; leave it unset, or use cap")
            for key, value in chosen.items()
            if value is not None
        ]
    if name != "cispo" and kl == "none" and numbers["cap"] != _UNUSED.cap:
        faults.append(
            (
                "cap",
                f"objective {name!r} without a KL term reads no cap; leave it at {_UNUSED.cap:g}",
            )
        )
    if correction == "none" and numbers["correction_cap"] != _UNUSED.correction_cap:
        faults.append(
            ("correction_cap", f"correction 'none' reads no cap; leave it at {_UNUSED.correction_cap:g}")
        )
    if kl != "none" and numbers["kl_coef"] == 0.0:
        faults.append(("kl", f"{kl!r} has no effect with kl_coef = 0; set kl_coef, or kl = 'none'"))
    return faults
