"""Keys that can be changed while a run goes on, and the config that a change makes."""

from __future__ import annotations

from typing import Any

from headway.config.loading import validate
from headway.config.schema import RunConfig
from headway.errors import ConfigError

LIVE_KEYS = (
    "algo.cap",
    "algo.clip_high",
    "algo.clip_low",
    "algo.correction_cap",
    "learner.lr",
    "push.interval",
    "staleness.max_lag",
    "staleness.slots",
    "staleness.target_ess",
    "staleness.unit",
    "staleness.window",
)


def changed(config: RunConfig, key: str, value: Any) -> RunConfig:
    """The config with one live key changed.

    Args:
        value: as in a recipe.

    Raises:
        ConfigError: the key cannot be changed while a run goes on, or what any recipe would be refused for.
    """
    if key not in LIVE_KEYS:
        raise ConfigError(
            [(key, f"cannot be changed while a run goes on; these can: {', '.join(LIVE_KEYS)}")]
        )
    section, _, leaf = key.rpartition(".")
    data = config.model_dump()
    data[section] = {**data[section], leaf: value}
    return validate(data)
