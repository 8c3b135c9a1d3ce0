"""The rules of [staleness], [push] interval and what they share with [batch]."""

from __future__ import annotations

from headway.config import derived
from headway.config.rule import Rule
from headway.config.schema import RunConfig


def _window_fits(config: RunConfig) -> str:
    if not derived.has_window(config):
        if config.staleness.window == 0:
            return ""
        return f"policy {config.staleness.policy!r} takes any finished group and has no window; leave it at 0"
    limit, window, prompts = config.staleness.max_lag, derived.window(config), config.batch.prompts
    if limit == 0 and window > 1:
        return (
            f"{window} contradicts max_lag = 0, which trains groups strictly in order; nearest: window "
            "= 1, or 0"
        )
    if derived.most_slots(config) >= prompts:
        return ""
    most = limit * prompts + 1
    overtaken = -(-(window - 1) // prompts)
    return (
        f"{window} alone lets a group wait for {overtaken} optimizer steps, but max_lag = {limit}; "
        f"nearest: window = {most} (1 + P * max_lag), or max_lag = {overtaken}"
    )


def _slots_fill_a_batch(config: RunConfig) -> str:
    prompts = config.batch.prompts
    if 0 < config.staleness.slots < prompts:
        return (
            f"{config.staleness.slots} tickets never fill one update of batch.prompts = {prompts}; "
            f"nearest: slots = {prompts}, or 0 for all that max_lag allows"
        )
    return ""


def _slots_keep_the_bound(config: RunConfig) -> str:
    if config.staleness.policy == "drop":  # more of them are allowed, and drop more
        return ""
    most = derived.most_slots(config)
    if most < config.batch.prompts or config.staleness.slots <= most:
        return ""
    return (
        f"{config.staleness.slots} tickets outstanding break max_lag = {config.staleness.max_lag}"
        f"{_with_window(config)}; nearest: slots = {most}, or 0 for all that max_lag allows"
    )


def _push_in_time(config: RunConfig) -> str:
    interval, prompts = config.push.interval, config.batch.prompts
    steps = derived.most_slots(config) // prompts
    if steps < 1 or interval <= steps:
        return ""
    if not derived.has_window(config):
        return (
            f"{interval} steps per push make every sample older than max_lag = "
            f"{config.staleness.max_lag}; nearest: interval = {steps}, or max_lag = {interval - 1}"
        )
    window = derived.window(config)
    return (
        f"{interval} steps per push starve the generators: max_lag = {config.staleness.max_lag} and window = {window} "
        f"leave slots for {steps} whole steps; nearest: interval = {steps}, or max_lag = "
        f"{derived.lag_for_interval(interval, prompts, window)} with the same window"
    )


def _with_window(config: RunConfig) -> str:
    return f" with window = {derived.window(config)}" if derived.has_window(config) else ""


def _target_has_something_to_move(config: RunConfig) -> str:
    if not config.staleness.target_ess or config.staleness.max_lag > 0:
        return ""
    return (
        f"{config.staleness.target_ess:g} has nothing to move with max_lag = 0, where every ratio is 1; nearest: "
        "target_ess = 0, or max_lag = 1"
    )


def _window_keys(key: str) -> tuple[str, ...]:
    others = ("staleness.window", "staleness.max_lag", "staleness.policy", "batch.prompts")
    return (key, *(other for other in others if other != key))


STALENESS_RULES: tuple[Rule, ...] = (
    Rule(_window_keys("staleness.window"), _window_fits),
    Rule(("staleness.slots", "batch.prompts"), _slots_fill_a_batch),
    Rule(("staleness.slots", *_window_keys("staleness.window")), _slots_keep_the_bound),
    Rule(("push.interval", *_window_keys("staleness.window")), _push_in_time),
    Rule(("staleness.target_ess", "staleness.max_lag"), _target_has_something_to_move),
)
