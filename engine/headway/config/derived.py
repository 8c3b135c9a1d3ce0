"""What follows from a recipe: the values that keys left open take, and the numbers that people ask for.

Pure functions of the frozen tree; the gate, the plan and the checks all read them here, so that they agree.
"""

from __future__ import annotations

import math
import os

from headway.config.agreement import DEFAULT_LIMITS, AgreementLimits
from headway.config.schema import RunConfig


def has_window(config: RunConfig) -> bool:
    """Whether the staleness policy takes groups from a window; the others take any finished group."""
    return config.staleness.policy == "window"


def window(config: RunConfig) -> int:
    """W of policy `window`.

    How many admission indices past the oldest untrained group may be taken.
    """
    return config.staleness.window or default_window(config.staleness.max_lag, config.batch.prompts)


def default_window(max_lag: int, groups_per_step: int) -> int:
    """1 + P min(floor(L / 2), L - 2): up to half of the lag is for overtaking, but admission keeps two steps of it."""
    return 1 + max(groups_per_step, 0) * max(0, min(max_lag // 2, max_lag - 2))


def windowed_slots(max_lag: int, groups_per_step: int, window: int) -> int:
    """(L + 1) P - (W - 1): tickets that may be outstanding without making any group too old.

    A group is trained after the older ones that are outstanding with it and after at most W - 1 newer ones. Fewer than
    P: no such run is possible.
    """
    return (max_lag + 1) * groups_per_step - (window - 1)


def lag_for_interval(push_interval: int, groups_per_step: int, window: int) -> int:
    """The least max_lag whose slots hold K whole steps beside a window of W: K - 1 + ceil((W - 1) / P)."""
    return push_interval - 1 - (-(window - 1) // groups_per_step)


def most_slots(config: RunConfig) -> int:
    """Tickets that the bound allows outstanding at most; the policies without a window have W = 1."""
    width = window(config) if has_window(config) else 1
    return windowed_slots(config.staleness.max_lag, config.batch.prompts, width)


def slots(config: RunConfig) -> int:
    """Tickets outstanding at most: staleness.slots, or all that max_lag allows."""
    return config.staleness.slots or most_slots(config)


def reachable_lag(config: RunConfig) -> int:
    """The largest lag that the slots and the number of steps leave possible; at most max_lag."""
    if not has_window(config):  # any number of groups may overtake a straggler
        free = slots(config) > config.batch.prompts
        return max(0, min(config.staleness.max_lag if free else 0, config.steps - 1))
    overtaken = window(config) - 1 if slots(config) > config.batch.prompts else 0
    by_slots = (slots(config) - 1 + overtaken) // config.batch.prompts
    return max(0, min(config.staleness.max_lag, by_slots, config.steps - 1))


def sequences_per_update(config: RunConfig) -> int:
    """N = P * G."""
    return config.batch.prompts * config.batch.samples


def sequences_in_flight(config: RunConfig) -> int:
    """Most sequences that are sampled, buffered or waiting at any moment."""
    return slots(config) * config.batch.samples


def rows_per_update(config: RunConfig) -> int:
    """Estimate of the packed rows of one update: every completion at its budget, prompts not counted."""
    per_row = max(1, config.batch.tokens_per_row // max(1, config.sampling.max_new_tokens))
    return -(-sequences_per_update(config) // per_row)


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads(config: RunConfig, role: str, cores: int | None = None) -> int:
    """Torch threads of one process: what the recipe says, else cores shared fairly among all processes.

    Args:
        role: "learner" or "generator".
        cores: to share; None: those that this process may use.
    """
    chosen = config.learner.threads if role == "learner" else config.generator.threads
    return chosen or max(1, (cores or available_cores()) // (config.generator.replicas + 1))


def gpus_of_a_generator(config: RunConfig) -> int:
    """GPUs that one generator computes on."""
    size = config.generator.vllm.get("tensor_parallel_size", 1) if config.generator.engine == "vllm" else 1
    return size if isinstance(size, int) and size > 0 else 1  # what is no number is refused by the engine


def generator_dtype(config: RunConfig) -> str:
    """What the generators' layers compute in."""
    if config.generator.engine != "vllm":
        return "float32"
    return str(config.generator.vllm.get("dtype", config.push.dtype))


def sides_compare(config: RunConfig) -> bool:
    """Whether both sides score a token over the same ids, so that equal weights give equal log-probs."""
    return config.sampling.kept_sets != "ignore"


def agreement_limits(config: RunConfig) -> AgreementLimits:
    """How far apart the two sides may be at equal weights: [agreement], or what their dtypes allow."""
    dtypes = (config.learner.dtype, generator_dtype(config), config.model.head_dtype)
    default = DEFAULT_LIMITS["float32" if set(dtypes) == {"float32"} else "bfloat16"]
    given = config.agreement
    return AgreementLimits(
        mean_log_ratio=given.mean_log_ratio or default.mean_log_ratio,
        max_log_ratio=given.max_log_ratio or default.max_log_ratio,
        min_ess=given.min_ess or default.min_ess,
    )


def largest_log_ratio(config: RunConfig) -> float:
    """How far apart a token at lag 0 may be in any batch; infinite where the sides score over different ids."""
    return agreement_limits(config).max_log_ratio if sides_compare(config) else math.inf


def numerics(config: RunConfig, attention: str) -> str:
    """What decides a log-prob besides the weights, for people.

    Args:
        attention: the back-end that the learner runs with.
    """
    learner = config.learner
    sampler = "processed_logprobs" if config.generator.engine == "vllm" else "full softmax"
    if config.sampling.kept_sets != "refuse":
        sampler = (
            "over kept sets"
            if config.sampling.kept_sets == "carry"
            else "over kept sets, trained over all ids,"
        )
    return (
        f"learner: {learner.dtype} on {learner.device}, attention {attention!r}; generators: "
        f"{config.generator.engine}, {generator_dtype(config)}, log-probs {sampler} at temperature "
        f"{config.sampling.temperature:g}; head: {config.model.head_dtype} on both sides"
    )
