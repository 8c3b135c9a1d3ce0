"""Keys that can be changed while a run goes on, and the config that a change makes."""

from __future__ import annotations

from typing import Any

from headway.config.loading import typed, validate
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
    return validate(_with(config, key, value))


def mirrored(config: RunConfig, key: str, value: Any) -> RunConfig:
    """As `changed`, without the rules between keys: for who follows a config that another process owns.

    The owner alone knows every change that is in force, so it alone can say what contradicts what.

    Raises:
        ConfigError: the key cannot be changed while a run goes on, or the value is none for it.
    """
    return typed(_with(config, key, value))


def as_text(value: Any) -> str:
    """A value as headway.config.loading.parse_value reads it back."""
    return "none" if value is None else str(value)


def _with(config: RunConfig, key: str, value: Any) -> dict[str, Any]:
    if key not in LIVE_KEYS:
        raise ConfigError(
            [(key, f"cannot be changed while a run goes on; these can: {', '.join(LIVE_KEYS)}")]
        )
    section, _, leaf = key.rpartition(".")
    data = config.model_dump()
    data[section] = {**data[section], leaf: value}
    return data
