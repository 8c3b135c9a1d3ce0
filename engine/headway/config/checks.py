"""Rules that span several keys, or that one key's range cannot say. All are checked, all faults are reported.

Each message says what contradicts what and names the nearest values that work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from headway.config import paths
from headway.config.rule import Rule
from headway.config.schema import AlgoConfig, RunConfig
from headway.config.staleness_checks import STALENESS_RULES

CLIPPED = ("grpo", "dapo", "dr_grpo", "rloo", "gspo")
IMPORTANCE_RATIO = ("cispo", "gspo")  # their ratio is pi/mu already: a correction would count it twice

# What an objective's paper fixes; every other choice is free.
FIXED: dict[str, dict[str, str]] = {
    "dapo": {"denominator": "tokens"},
    "dr_grpo": {"advantage": "mean", "denominator": "constant"},
    "rloo": {"advantage": "loo"},
    "gspo": {"denominator": "sequences"},
}


def faults(config: RunConfig, skip: Collection[str] = ()) -> list[tuple[str, str]]:
    """Every broken rule as (dotted path, message), leaving out rules that read a key of `skip`."""
    found = [
        (path, f"must be finite, got {value}") for path, value in _not_finite(config) if path not in skip
    ]
    blocked = {*skip, *(path for path, _ in found)}
    for rule in RULES:
        if not any(_concerns(key, blocked) for key in rule.keys):
            message = rule.broken(config)
            if message:
                found.append((rule.keys[0], message))
    return found


def _concerns(key: str, blocked: Collection[str]) -> bool:
    return any(key == path or path == key.rpartition(".")[0] for path in blocked)


def _not_finite(config: RunConfig) -> list[tuple[str, float]]:
    values = [(path, value_of(config, path)) for path in paths.fields()]
    return [(path, value) for path, value in values if isinstance(value, float) and not math.isfinite(value)]


def value_of(config: RunConfig, path: str) -> Any:
    """The value at a dotted path of the schema."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _temperature_trains(config: RunConfig) -> str:
    if config.sampling.temperature > 0.0:
        return ""
    return (
        "0 is greedy: every member of a group would be the same and have no log-prob to train on; "
        "nearest: 1.0"
    )


def _kept_mass(name: str, off: float) -> Callable[[RunConfig], str]:
    def broken(config: RunConfig) -> str:
        value = getattr(config.sampling, name)
        if value == off:
            return ""
        return (
            f"{value} truncates the distribution that samples, but not the one that trains: every ratio "
            "would be off "
            f"by the kept mass; evaluation only, for training nearest: {off}"
        )

    return broken


def _budget_exists(config: RunConfig) -> str:
    return "" if config.sampling.max_new_tokens else "0 leaves nothing to sample; nearest: 1"


def _row_holds_a_trajectory(config: RunConfig) -> str:
    row, budget = config.batch.tokens_per_row, config.sampling.max_new_tokens
    if row > budget:
        return ""
    return (
        f"{row} cannot hold a prompt and sampling.max_new_tokens = {budget}: no completion at its budget "
        "could be "
        f"trained; nearest: tokens_per_row = {budget + 1} and the longest prompt, or max_new_tokens = "
        f"{row - 1}"
    )


def _group_has_a_baseline(config: RunConfig) -> str:
    if config.batch.samples >= 2:
        return ""
    return (
        "1 leaves a group without a baseline: its one reward minus the group's mean is always 0; "
        "nearest: samples = 2"
    )


def _only_clipped(name: str) -> Callable[[RunConfig], str]:
    def broken(config: RunConfig) -> str:
        if getattr(config.algo, name) is None or config.algo.objective in CLIPPED:
            return ""
        return (
            f"objective = {config.algo.objective!r} does not clip; unset it, or nearest: objective = 'grpo' "
            f"(of {', '.join(CLIPPED)})" + (", or cap for cispo" if config.algo.objective == "cispo" else "")
        )

    return broken


def _clip_low_is_a_share(config: RunConfig) -> str:
    low = config.algo.clip_low
    if low is None or low < 1.0 or config.algo.objective not in CLIPPED:
        return ""
    return (
        f"{low} clips nothing: a ratio is positive and the lower bound 1 - clip_low is not; nearest: "
        "0.2, or unset"
    )


def _fixed_by_the_objective(name: str) -> Callable[[RunConfig], str]:
    def broken(config: RunConfig) -> str:
        value, objective = getattr(config.algo, name), config.algo.objective
        fixed = FIXED.get(objective, {}).get(name, "")
        if not fixed or value in ("", fixed):
            return ""
        return f"{value!r} contradicts objective = {objective!r}, which is defined by {fixed!r}; nearest: {fixed!r}"

    return broken


def _cap_is_read(config: RunConfig) -> str:
    default = _default("cap")
    if config.algo.cap == default or config.algo.objective == "cispo" or config.algo.kl != "none":
        return ""
    return (
        f"objective = {config.algo.objective!r} without a KL term reads no cap; nearest: {default:g}, or "
        "objective = 'cispo'"
    )


def _correction_cap_is_read(config: RunConfig) -> str:
    default = _default("correction_cap")
    if config.algo.correction_cap == default or config.algo.correction != "none":
        return ""
    return f"correction = 'none' reads no cap; nearest: {default:g}, or correction = 'tis'"


def _default(name: str) -> float:
    return AlgoConfig.model_fields[name].default


def _correction_counts_once(config: RunConfig) -> str:
    if config.algo.correction == "none" or config.algo.objective not in IMPORTANCE_RATIO:
        return ""
    return (
        f"{config.algo.correction!r} with objective = {config.algo.objective!r} would weigh by "
        "pi/behaviour twice: "
        "its ratio is that already; nearest: correction = 'none', or objective = 'grpo'"
    )


def _kl_has_both(config: RunConfig) -> str:
    if config.algo.kl_coef > 0.0 and config.algo.kl == "none":
        return (
            f"{config.algo.kl_coef} weighs a term that kl = 'none' leaves out; nearest: kl = 'k3', or "
            "kl_coef = 0"
        )
    if config.algo.kl_coef == 0.0 and config.algo.kl != "none":
        return f"0 leaves kl = {config.algo.kl!r} without effect; nearest: kl_coef = 0.001, or kl = 'none'"
    return ""


def _reference_is_used(config: RunConfig) -> str:
    if config.model.reference and config.algo.kl == "none":
        return (
            "is loaded for a KL term that kl = 'none' leaves out; nearest: unset it, or algo.kl = "
            "'k3' with a kl_coef"
        )
    return ""


def _cache_holds_a_sequence(config: RunConfig) -> str:
    tokens, budget = config.generator.kv_tokens, config.sampling.max_new_tokens
    if tokens == 0 or tokens > budget:
        return ""
    return (
        f"{tokens} tokens of cache cannot hold one prompt and sampling.max_new_tokens = {budget}; nearest: "
        f"{budget + 1} and the longest prompt, or 0 for what max_running sequences need"
    )


RULES: tuple[Rule, ...] = (
    Rule(("model.reference", "algo.kl"), _reference_is_used),
    Rule(("batch.samples",), _group_has_a_baseline),
    Rule(("batch.tokens_per_row", "sampling.max_new_tokens"), _row_holds_a_trajectory),
    Rule(("sampling.temperature",), _temperature_trains),
    Rule(("sampling.max_new_tokens",), _budget_exists),
    Rule(("sampling.top_k",), _kept_mass("top_k", 0)),
    Rule(("sampling.top_p",), _kept_mass("top_p", 1.0)),
    Rule(("sampling.min_p",), _kept_mass("min_p", 0.0)),
    Rule(("algo.advantage", "algo.objective"), _fixed_by_the_objective("advantage")),
    Rule(("algo.denominator", "algo.objective"), _fixed_by_the_objective("denominator")),
    Rule(("algo.clip_low", "algo.objective"), _only_clipped("clip_low")),
    Rule(("algo.clip_low", "algo.objective"), _clip_low_is_a_share),
    Rule(("algo.clip_high", "algo.objective"), _only_clipped("clip_high")),
    Rule(("algo.dual_clip", "algo.objective"), _only_clipped("dual_clip")),
    Rule(("algo.correction", "algo.objective"), _correction_counts_once),
    Rule(("algo.cap", "algo.objective", "algo.kl"), _cap_is_read),
    Rule(("algo.correction_cap", "algo.correction"), _correction_cap_is_read),
    Rule(("algo.kl_coef", "algo.kl"), _kl_has_both),
    Rule(("generator.kv_tokens", "sampling.max_new_tokens"), _cache_holds_a_sequence),
    *STALENESS_RULES,
)
