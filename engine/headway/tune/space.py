"""What a study may change: keys that move throughput and lag, not what is learnt from a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.config import RunConfig
from headway.config.loading import validate


@dataclass(frozen=True)
class Limits:
    """What a study must keep.

    Attributes:
        lag: mean lag of a trained token at most, None: any; max_lag: staleness.max_lag at most.
        replicas: generators at most; 0: as the recipe says.
    """

    lag: float | None = None
    max_lag: int = 8
    replicas: int = 0


@dataclass(frozen=True)
class Space:
    """The choices of each key, ascending; the recipe's own value is among them."""

    choices: dict[str, list[int]]

    @staticmethod
    def of(config: RunConfig, limits: Limits) -> Space:
        """Around a recipe."""
        running, lag = config.generator.max_running, config.staleness.max_lag
        most = max(limits.replicas, config.generator.replicas)
        return Space({
            "staleness.max_lag": sorted({lag, *(n for n in (1, 2, 4, 8, 16, 32) if n <= limits.max_lag)}),
            "generator.max_running": sorted({max(1, running // 4), max(1, running // 2), running, 2 * running}),
            "push.interval": sorted({config.push.interval, 1, 2}),
            "generator.replicas": list(range(1, most + 1)),
        })  # fmt: skip

    def own(self, config: RunConfig) -> dict[str, int]:
        """The recipe's values."""
        return {key: _get(config, key) for key in self.choices}

    def nearest(self, values: Mapping[str, int]) -> dict[str, int]:
        """The choices next to these values; keys that are not named keep their smallest."""
        return {
            key: min(choices, key=lambda choice: abs(choice - values.get(key, choices[0])))
            for key, choices in self.choices.items()
        }


def with_values(config: RunConfig, values: Mapping[str, int]) -> RunConfig:
    """The recipe with other values.

    Raises:
        ConfigError: they contradict the rest of it.
    """
    data = config.model_dump()
    for key, value in values.items():
        section, name = key.split(".")
        data[section][name] = value
        if name == "replicas" and value != config.generator.replicas:
            data["generator"]["gpus"] = []
    return validate(data)


def _get(config: RunConfig, key: str) -> int:
    section, name = key.split(".")
    return int(getattr(getattr(config, section), name))
