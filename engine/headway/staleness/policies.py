"""Policies by the name that `staleness.policy` gives them."""

from __future__ import annotations

from headway.errors import ConfigError
from headway.staleness.free import CapacityPolicy, DropPolicy, WaitPolicy
from headway.staleness.policy import StalenessPolicy
from headway.staleness.window import WindowPolicy

_FREE = {policy.name: policy for policy in (CapacityPolicy, DropPolicy, WaitPolicy)}
POLICIES = (WindowPolicy.name, *_FREE)


def make_policy(
    name: str,
    max_lag: int,
    groups_per_step: int,
    *,
    window: int | None = None,
    push_interval: int = 1,
    slots: int | None = None,
) -> StalenessPolicy:
    """The policy of a recipe.

    Args:
        name: one of POLICIES. window: of the `window` policy only. The rest as the policies say.

    Raises:
        ConfigError: no such policy, or an impossible combination.
    """
    if name == WindowPolicy.name:
        return WindowPolicy(max_lag, groups_per_step, window, push_interval, slots)
    if name not in _FREE:
        raise ConfigError([("staleness.policy", f"{name!r} is unknown; choose from {', '.join(POLICIES)}")])
    if window is not None:
        raise ConfigError([("staleness.window", f"policy {name!r} has no window; leave it at 0")])
    return _FREE[name](max_lag, groups_per_step, push_interval, slots)
