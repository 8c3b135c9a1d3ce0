"""The rules of [algo]: what an objective is defined by, and values that its loss would never read.

The loss refuses the same (headway_kernels.objective), but this layer imports no torch; a test compares the two. Called
with a recipe by headway.config.checks and with keyword arguments by headway.algo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headway.config.schema import AlgoConfig

CLIPPED = ("grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "decoupled_ppo", "gspo")
CORRECTABLE = (*CLIPPED[:-1], "sapo")  # the ratio of the others is pi/mu: a correction would count it twice
CAPPED = ("cispo", "vtrace")

# What an objective's paper fixes; every other choice is free.
FIXED: dict[str, dict[str, str]] = {
    "dapo": {"denominator": "tokens"},
    "dr_grpo": {"advantage": "mean", "denominator": "constant"},
    "rloo": {"advantage": "loo"},
    "reinforce_pp": {"advantage": "batch", "denominator": "tokens"},
    "gspo": {"denominator": "sequences"},
}
# Keys that one objective alone reads.
OWN = {
    "gate_positive": "sapo",
    "gate_negative": "sapo",
    "tv_bound": "dppo_tv",
    "m2_bound": "m2po",
    "trace_lambda": "vtrace",
    "trace_cap": "vtrace",
}


class AlgoRule(NamedTuple):
    """One rule: the keys of [algo] it reads, the first of which is at fault, and what it says when broken."""

    keys: tuple[str, ...]
    broken: Callable[[AlgoConfig], str]


def correction_of(algo: AlgoConfig) -> str:
    """The correction in force: the objective's own where none was chosen."""
    return algo.correction or ("tis" if algo.objective == "decoupled_ppo" else "none")


def proximal_of(algo: AlgoConfig) -> str:
    """The proximal policy in force: the objective's own where none was chosen."""
    return algo.proximal or ("lag" if algo.objective == "decoupled_ppo" else "learner")


def default_of(name: str) -> float:
    """The default of a numeric key."""
    return AlgoConfig.model_fields[name].default


def _only_clipped(name: str) -> Callable[[AlgoConfig], str]:
    def broken(algo: AlgoConfig) -> str:
        if getattr(algo, name) is None:
            return ""
        if algo.objective not in CLIPPED:
            other = ", or cap" if algo.objective in CAPPED else ""
            return (
                f"objective = {algo.objective!r} does not clip; unset it, or nearest: objective = 'grpo' (of "
                f"{', '.join(CLIPPED)}){other}"
            )
        return _ratio_moves(algo)

    return broken


def _ratio_moves(algo: AlgoConfig) -> str:
    """Why bounds of the ratio have no effect; "" if they have one."""
    if correction_of(algo) == "none" or proximal_of(algo) == "lag":
        return ""
    return (
        f"correction = {correction_of(algo)!r} with proximal = 'learner' makes the ratio pi/prox 1, which no bound "
        "meets; unset it, or nearest: proximal = 'lag'"
    )


def _clip_low_is_a_share(algo: AlgoConfig) -> str:
    if algo.clip_low is None or algo.clip_low < 1.0 or algo.objective not in CLIPPED:
        return ""
    return (
        f"{algo.clip_low} clips nothing: a ratio is positive and the lower bound 1 - clip_low is not; nearest: 0.2, "
        "or unset"
    )


def _fixed(name: str) -> Callable[[AlgoConfig], str]:
    def broken(algo: AlgoConfig) -> str:
        value, fixed = getattr(algo, name), FIXED.get(algo.objective, {}).get(name, "")
        if not fixed or value in ("", fixed):
            return ""
        return (
            f"{value!r} contradicts objective = {algo.objective!r}, which is defined by {fixed!r}; "
            f"nearest: {fixed!r}"
        )

    return broken


def _own(name: str) -> Callable[[AlgoConfig], str]:
    def broken(algo: AlgoConfig) -> str:
        default, value = default_of(name), getattr(algo, name)
        if value == default:
            return ""
        if algo.objective != OWN[name]:
            return f"only objective = {OWN[name]!r} reads it, not {algo.objective!r}; nearest: {default:g}"
        return _ratio_moves(algo) if algo.objective == "sapo" else ""

    return broken


def _cap_is_read(algo: AlgoConfig) -> str:
    default = default_of("cap")
    if algo.cap == default or algo.objective in CAPPED or algo.kl != "none":
        return ""
    return f"{algo.objective!r} without a KL term reads no cap; nearest: {default:g}, or objective = 'cispo'"


def _correction_counts_once(algo: AlgoConfig) -> str:
    correction = correction_of(algo)
    if correction == "none":
        if algo.objective != "decoupled_ppo":
            return ""
        return "'none' leaves decoupled_ppo without its weight prox/behaviour; nearest: 'tis', or objective = 'ppo'"
    if algo.objective in CORRECTABLE:
        return ""
    return (
        f"{correction!r} with objective = {algo.objective!r} would count it twice: its ratio is pi/behaviour "
        "already; nearest: correction = 'none', or objective = 'grpo'"
    )


def _correction_reads(name: str, corrections: tuple[str, ...]) -> Callable[[AlgoConfig], str]:
    def broken(algo: AlgoConfig) -> str:
        default, value = AlgoConfig.model_fields[name].default, getattr(algo, name)
        if value == default or correction_of(algo) in corrections:
            return ""
        return (
            f"correction = {correction_of(algo)!r} does not read it; nearest: {default!r}, or correction = "
            f"{corrections[0]!r}"
        )

    return broken


def _floor_is_below_the_cap(algo: AlgoConfig) -> str:
    if correction_of(algo) != "icepop" or algo.correction_floor <= algo.correction_cap:
        return ""
    return (
        f"{algo.correction_floor} is above correction_cap = {algo.correction_cap}: every token would be rejected; "
        f"nearest: {algo.correction_cap}"
    )


def _kl_has_both(algo: AlgoConfig) -> str:
    if algo.kl_coef > 0.0 and algo.kl == "none":
        return f"{algo.kl_coef} weighs a term that kl = 'none' leaves out; nearest: kl = 'k3', or kl_coef = 0"
    if algo.kl_coef == 0.0 and algo.kl != "none":
        return f"0 leaves kl = {algo.kl!r} without effect; nearest: kl_coef = 0.001, or kl = 'none'"
    return ""


_ALL = ("tis", "icepop", "mis")
ALGO_RULES: tuple[AlgoRule, ...] = (
    AlgoRule(("advantage", "objective"), _fixed("advantage")),
    AlgoRule(("denominator", "objective"), _fixed("denominator")),
    *(
        AlgoRule((name, "objective", "correction", "proximal"), _only_clipped(name))
        for name in ("clip_low", "clip_high", "dual_clip")
    ),
    AlgoRule(("clip_low", "objective"), _clip_low_is_a_share),
    AlgoRule(("correction", "objective"), _correction_counts_once),
    AlgoRule(("correction_level", "correction"), _correction_reads("correction_level", _ALL)),
    AlgoRule(("correction_cap", "correction"), _correction_reads("correction_cap", _ALL)),
    AlgoRule(("correction_floor", "correction"), _correction_reads("correction_floor", ("icepop",))),
    AlgoRule(("correction_floor", "correction_cap", "correction"), _floor_is_below_the_cap),
    AlgoRule(("proximal", "correction"), _correction_reads("proximal", _ALL)),
    AlgoRule(("cap", "objective", "kl"), _cap_is_read),
    *(AlgoRule((name, "objective", "correction", "proximal"), _own(name)) for name in OWN),
    AlgoRule(("kl_coef", "kl"), _kl_has_both),
)


def algo_faults(algo: AlgoConfig) -> list[tuple[str, str]]:
    """Every broken rule as (key of [algo], message), the first of each key."""
    found: dict[str, str] = {}
    for rule in ALGO_RULES:
        message = rule.broken(algo)
        if message:
            found.setdefault(rule.keys[0], message)
    return list(found.items())
