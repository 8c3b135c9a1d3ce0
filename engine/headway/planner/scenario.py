"""What a plan is about: a recipe's numbers beside a calibration, and the "what if" on top."""

from __future__ import annotations

from dataclasses import dataclass

from headway.config import RunConfig, derived
from headway.errors import ConfigError
from headway.planner.rates import Rates
from headway.staleness import StalenessPolicy, StalenessUnit, make_policy


@dataclass(frozen=True)
class Scenario:
    """Everything that the simulation needs.

    Attributes:
        policy: the engine's own; unit: what staleness judges; samples: G, members of a group.
        steps: optimizer steps; replicas: generators; max_running: sequences that one decodes at once.
        ranks: learner ranks that share the tokens of a step; mode, recompute: `push.mode`, and whether a push
            forwards the caches again.
        reward_workers: of each generator; one scores one completion at a time.
        filter_flat: groups without a gradient are replaced.
        warmup: first steps that count in no rate, share or lag.
        in_order: tickets have the lengths of Rates' groups one after the other instead of drawn ones.
        beside: learner and generators share a machine, so that Rates' `*_beside` factors apply.
        link_bytes_per_s: of the network that a push crosses; 0: as calibrated.
        losses_per_hour: of each generator; restart_s: until a lost one is back.
        generator_price, rank_price: per hour each, in any currency.
    """

    rates: Rates
    policy: StalenessPolicy
    samples: int
    steps: int
    replicas: int
    max_running: int
    ranks: int = 1
    unit: StalenessUnit = StalenessUnit.TRAJECTORY
    mode: str = "in_flight"
    recompute: bool = False
    reward_workers: int = 1
    filter_flat: bool = True
    warmup: int = 0
    in_order: bool = False
    beside: bool = True
    link_bytes_per_s: float = 0.0
    losses_per_hour: float = 0.0
    restart_s: float = 30.0
    generator_price: float = 0.0
    rank_price: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.steps:
            raise ConfigError([("steps", f"{self.warmup} steps of warm-up leave nothing of {self.steps}")])
        if self.max_running < self.samples:
            message = f"{self.max_running} sequences do not hold a group of {self.samples}; use at least {self.samples}"
            raise ConfigError([("generator.max_running", message)])

    @property
    def concurrent(self) -> int:
        """Most sequences that are decoded at once."""
        return min(self.replicas * self.max_running, self.policy.slots * self.samples)


def scenario_of(
    config: RunConfig, rates: Rates, *, warmup: int = 0, in_order: bool = False, beside: bool = True
) -> Scenario:
    """The scenario of a recipe.

    Args:
        warmup, in_order, beside: see Scenario.

    Raises:
        ConfigError: its staleness numbers are impossible together.
    """
    staleness = config.staleness
    policy = make_policy(
        staleness.policy,
        staleness.max_lag,
        config.batch.prompts,
        window=derived.window(config) if derived.has_window(config) else None,
        push_interval=config.push.interval,
        slots=staleness.slots or None,
    )
    return Scenario(
        rates=rates,
        policy=policy,
        samples=config.batch.samples,
        steps=config.steps,
        replicas=config.generator.replicas,
        max_running=config.generator.max_running,
        unit=StalenessUnit(staleness.unit),
        mode=config.push.mode,
        recompute=config.push.kv != "keep",
        reward_workers=config.reward.workers,
        filter_flat=config.algo.filter_zero_variance,
        beside=beside,
        warmup=warmup,
        in_order=in_order,
    )
