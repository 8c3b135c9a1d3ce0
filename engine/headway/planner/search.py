"""Which settings of a recipe make a plan better: one key at a time, by simulating, until nothing helps any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headway.config import RunConfig
from headway.errors import ConfigError
from headway.planner.forecast import Forecast
from headway.planner.scenario import Scenario
from headway.planner.simulate import simulate

WORTH = 0.01  # a change that gains less is not proposed
MOST_ROUNDS = 12
KEYS = {
    "generator.replicas": "more or fewer generators for the same learner",
    "generator.max_running": "sequences that one decode step serves",
    "batch.prompts": "fixed costs of an update and a push spread over another number of groups",
    "staleness.max_lag": "groups that may be out while the learner works",
    "push.interval": "updates that share the pauses of one push",
}


@dataclass(frozen=True)
class Limits:
    """What a proposal must keep.

    Attributes:
        lag: mean lag of a token at most; learner_idle: share of the learner's time at most; None: any.
        replicas: generators at most. running: sequences of one generator at most; 0: as far as was calibrated.
        ess: effective sample size at least, where an update of lag lowers it by `drift` (see Rates).
    """

    lag: float | None = None
    learner_idle: float | None = None
    replicas: int = 1
    running: int = 0
    ess: float | None = None
    drift: float = 0.0

    def excess(self, forecast: Forecast) -> float:
        """How far a forecast is beyond; 0 when it keeps them."""
        lag = 0.0 if self.lag is None else max(0.0, forecast.lag_mean - self.lag)
        idle = 0.0 if self.learner_idle is None else max(0.0, forecast.learner_idle - self.learner_idle)
        ess = 0.0 if self.ess is None else max(0.0, self.ess - forecast.ess(self.drift))
        return lag + idle + ess

    def score(self, forecast: Forecast) -> tuple[float, float]:
        """(less excess is better, more tokens per second or per price are better)."""
        worth = forecast.tokens_per_s
        if forecast.price > 0:
            worth /= forecast.price / forecast.wall_s
        return (-self.excess(forecast), worth)


@dataclass(frozen=True)
class Change:
    """One key of the recipe: its value before and after, and what it is good for."""

    key: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True)
class Proposal:
    """The best settings found.

    Attributes:
        config: the recipe with the changes; first, forecast: of the recipe as it was, and of this one.
        kept: the limits are kept; tried: scenarios simulated.
    """

    config: RunConfig
    first: Forecast
    forecast: Forecast
    changes: list[Change]
    kept: bool
    tried: int


class Search:
    """Coordinate ascent.

    Args:
        config: the recipe to start from.
        make: the scenario of a changed recipe; raises ConfigError for an impossible one.
        limits: to keep; as long as they are not kept, nearing them goes before throughput.
        seed: of every simulation, so that settings meet the same lengths.
    """

    def __init__(
        self, config: RunConfig, make: Callable[[RunConfig], Scenario], limits: Limits, seed: int = 0
    ) -> None:
        self._start = config
        self._make = make
        self._limits = limits
        self._seed = seed
        self._known: dict[tuple[int, ...], Forecast | None] = {}

    def run(self) -> Proposal:
        """From neighbour to better neighbour.

        Raises:
            ConfigError: the recipe itself cannot be planned.
        """
        config = best = self._start
        first = simulate(self._make(config), self._seed)
        score = self._score(config)
        for _ in range(MOST_ROUNDS):
            found = max(
                ((self._score(other), other) for other in self._neighbours(best)),
                key=lambda pair: pair[0],
                default=(score, best),
            )
            if not is_better(found[0], score):
                break
            score, best = found
        best = self._without_idle_changes(best)
        forecast = self._forecast(best)
        assert forecast is not None
        return Proposal(
            config=best,
            first=first,
            forecast=forecast,
            changes=[self._change(best, key) for key in KEYS if _get(config, key) != _get(best, key)],
            kept=self._limits.excess(forecast) <= 0.0,
            tried=len(self._known),
        )

    def _neighbours(self, config: RunConfig) -> Iterator[RunConfig]:
        prompts = _get(self._start, "batch.prompts")
        for key in KEYS:
            value = _get(config, key)
            for other in sorted({value // 2, value - 1, value + 1, value * 2} - {value}):
                if other < 1 or (key == "staleness.max_lag" and value == 0):
                    continue
                # Another batch is another training: half or twice of it is as far as a plan may go.
                if key == "batch.prompts" and not prompts <= 2 * other <= 4 * prompts:
                    continue
                yield _with(config, key, other)

    def _forecast(self, config: RunConfig) -> Forecast | None:
        """None: it cannot be, or is beyond what may be asked."""
        key = tuple(_get(config, name) for name in KEYS)
        if key not in self._known:
            self._known[key] = None
            try:
                scenario = self._make(config)
                if config.generator.replicas <= self._limits.replicas and self._is_calibrated(scenario):
                    self._known[key] = simulate(scenario, self._seed)
            except ConfigError:
                pass
        return self._known[key]

    def _is_calibrated(self, scenario: Scenario) -> bool:
        """Decode steps of so many sequences were measured, or the recipe asks for them itself."""
        points = scenario.rates.decode.points
        measured = self._limits.running or int(points[-1][0])
        return len(points) == 1 or scenario.max_running <= max(measured, self._start.generator.max_running)

    def _score(self, config: RunConfig) -> tuple[float, float]:
        forecast = self._forecast(config)
        return (-float("inf"), 0.0) if forecast is None else self._limits.score(forecast)

    def _without_idle_changes(self, best: RunConfig) -> RunConfig:
        """The same without the changes that are worth nothing, taken back one by one."""
        for key in KEYS:
            plain = _with(best, key, _get(self._start, key))
            if plain != best and not is_better(self._score(best), self._score(plain)):
                best = plain
        return best

    def _change(self, best: RunConfig, key: str) -> Change:
        before, after = _get(self._start, key), _get(best, key)
        plain, forecast = self._forecast(_with(best, key, before)), self._forecast(best)
        assert forecast is not None
        if plain is None:
            return Change(key, before, after, f"{KEYS[key]}; the other changes are not possible without it")
        told = (
            f"{KEYS[key]}; without it {plain.tokens_per_s:,.0f} instead of {forecast.tokens_per_s:,.0f} tokens/s, "
            f"lag {plain.lag_mean:.2f} instead of {forecast.lag_mean:.2f}, "
            f"learner idle {plain.learner_idle:.0%} instead of {forecast.learner_idle:.0%}"
        )
        return Change(key, before, after, told)


def is_better(score: tuple[float, float], than: tuple[float, float]) -> bool:
    """By enough to be worth a change."""
    if abs(score[0] - than[0]) > 1e-3:
        return score[0] > than[0]
    return score[1] > than[1] * (1.0 + WORTH)


def _get(config: RunConfig, key: str) -> int:
    section, name = key.split(".")
    return int(getattr(getattr(config, section), name))


def _with(config: RunConfig, key: str, value: int) -> RunConfig:
    section, name = key.split(".")
    changed = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: changed})
