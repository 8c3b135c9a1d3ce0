"""Rules that span several keys, or that one key's range cannot say. All are checked, all faults are reported.

Each message says what contradicts what and names the nearest values that work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from headway.config import paths
from headway.config.algo_checks import ALGO_RULES, AlgoRule
from headway.config.compute_checks import COMPUTE_RULES
from headway.config.lora_checks import LORA_RULES
from headway.config.push_checks import PUSH_RULES
from headway.config.rule import Rule
from headway.config.schema import RunConfig
from headway.config.staleness_checks import STALENESS_RULES
from headway.config.stream_checks import STREAM_RULES
from headway.config.telemetry_checks import TELEMETRY_RULES


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
        if value == off or config.sampling.kept_sets != "refuse":
            return ""
        return (
            f"{value} truncates the distribution that samples, but not the one that trains: every ratio would be off "
            f"by the kept mass; for training nearest: {off}, or sampling.kept_sets = 'carry'"
        )

    return broken


def _kept_sets_exist(config: RunConfig) -> str:
    sampling = config.sampling
    truncated = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    if sampling.kept_sets == "refuse" or truncated:
        return ""
    return (
        f"{sampling.kept_sets!r} has no effect: top_k, top_p and min_p are off, so every token is sampled from the "
        "whole vocabulary; nearest: kept_sets = 'refuse'"
    )


def _more_than_one_is_kept(config: RunConfig) -> str:
    if config.sampling.top_k != 1 or config.sampling.kept_sets == "refuse":
        return ""
    return "1 leaves each token one choice: there is no log-prob to train on; nearest: 2"


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


def _of_the_recipe(rule: AlgoRule) -> Rule:
    return Rule(tuple(f"algo.{key}" for key in rule.keys), lambda config: rule.broken(config.algo))


RULES: tuple[Rule, ...] = (
    Rule(("model.reference", "algo.kl"), _reference_is_used),
    Rule(("batch.samples",), _group_has_a_baseline),
    Rule(("batch.tokens_per_row", "sampling.max_new_tokens"), _row_holds_a_trajectory),
    Rule(("sampling.temperature",), _temperature_trains),
    Rule(("sampling.max_new_tokens",), _budget_exists),
    Rule(("sampling.top_k", "sampling.kept_sets"), _more_than_one_is_kept),
    Rule(("sampling.top_k", "sampling.kept_sets"), _kept_mass("top_k", 0)),
    Rule(("sampling.top_p", "sampling.kept_sets"), _kept_mass("top_p", 1.0)),
    Rule(("sampling.min_p", "sampling.kept_sets"), _kept_mass("min_p", 0.0)),
    Rule(
        ("sampling.kept_sets", "sampling.top_k", "sampling.top_p", "sampling.min_p"),
        _kept_sets_exist,
    ),
    *(_of_the_recipe(rule) for rule in ALGO_RULES),
    Rule(("generator.kv_tokens", "sampling.max_new_tokens"), _cache_holds_a_sequence),
    *STALENESS_RULES,
    *STREAM_RULES,
    *PUSH_RULES,
    *COMPUTE_RULES,
    *LORA_RULES,
    *TELEMETRY_RULES,
)
