"""`headway plan`: what a recipe will do on the machine of a calibration, and which settings would do better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headway.cli.running import recipe
from headway.config import RunConfig
from headway.errors import ConfigError
from headway.planner import Estimate, Forecast, Rates, Scenario, estimate, read_rates, scenario_of, simulate
from headway.planner.search import Limits, Proposal, Search, is_better

MOST_STEPS = 200  # simulated; the rest of a long run is like them
SEARCH_STEPS = 60
MOST_SAMPLES = 400_000  # simulated, half a minute's worth; large updates need fewer for the same precision
LEAST_STEPS = 8
BAR = 30  # characters of a share of 1


@dataclass(frozen=True)
class WhatIf:
    """What differs from the recipe and from the machine of the calibration; None and 0 change nothing.

    Attributes:
        replicas, ranks: generators and learner ranks; link_gbit: of the network that pushes cross, per second.
        losses_per_hour, restart_s: of each generator; generator_price, rank_price: per hour.
        elsewhere: learner and generators have machines of their own, though calibrated on one.
        length_factor, tail: of completions, see Rates.with_lengths.
    """

    replicas: int | None = None
    ranks: int = 1
    link_gbit: float = 0.0
    losses_per_hour: float = 0.0
    restart_s: float = 30.0
    generator_price: float = 0.0
    rank_price: float = 0.0
    elsewhere: bool = False
    length_factor: float = 1.0
    tail: int = 0

    def recipe(self, config: RunConfig) -> RunConfig:
        """The recipe with it."""
        if self.replicas is None:
            return config
        generator = config.generator.model_copy(update={"replicas": self.replicas})
        return config.model_copy(update={"generator": generator})

    def rates(self, path: Path) -> Rates:
        """A calibration with it.

        Raises:
            ConfigError: the file cannot be used.
        """
        rates = read_rates(path)
        if self.length_factor == 1.0 and not self.tail:
            return rates
        return rates.with_lengths(self.length_factor, self.tail)

    def scenario(self, config: RunConfig, rates: Rates, most_steps: int) -> Scenario:
        """The scenario of a recipe with it, of at most so many steps, a fifth of them (20 at most) to warm up.

        Updates of very many samples are simulated less often, so that the largest fleets take half a minute.
        """
        enough = max(LEAST_STEPS, MOST_SAMPLES // (config.batch.prompts * config.batch.samples))
        steps = min(config.steps, most_steps, enough)
        return replace(
            scenario_of(config, rates, beside=not self.elsewhere),
            steps=steps,
            warmup=min(20, steps // 5),
            ranks=self.ranks,
            link_bytes_per_s=self.link_gbit * 1e9 / 8,
            losses_per_hour=self.losses_per_hour,
            restart_s=self.restart_s,
            generator_price=self.generator_price,
            rank_price=self.rank_price,
        )


def plan(words: list[str], rates_path: Path, what: WhatIf, seed: int) -> Iterator[str]:
    """The lines of a plan.

    Raises:
        ConfigError: the recipe or the calibration cannot be used.
    """
    rates = what.rates(rates_path)
    config = what.recipe(recipe(words))
    scenario = what.scenario(config, rates, MOST_STEPS)
    yield f"calibrated on {rates.hardware}, {rates.model}"
    yield f"{scenario.steps} updates simulated, the first {scenario.warmup} to warm up; {scenario.policy!r}"
    yield ""
    yield from describe(scenario, simulate(scenario, seed), estimate(scenario))


def optimise(
    words: list[str], rates_path: Path, what: WhatIf, limits: Limits, seed: int, most_ranks: int = 0
) -> Iterator[str]:
    """The lines of a search; the changes are TOML that goes over the recipe.

    Args:
        most_ranks: learner ranks at most, searched from those of `what` on; they are no key of a recipe.

    Raises:
        ConfigError: the recipe or the calibration cannot be used.
    """
    rates = what.rates(rates_path)
    config = what.recipe(recipe(words))
    if limits.ess is not None and not rates.drift:
        raise ConfigError(
            [("--least-ess", f"{rates_path} says nothing of it; calibrate with a recipe that learns")]
        )
    limits = replace(limits, replicas=max(limits.replicas, config.generator.replicas), drift=rates.drift)
    found: Proposal | None = None
    best = what
    for ranks in range(what.ranks, max(what.ranks, most_ranks) + 1):
        other = replace(what, ranks=ranks)
        search = Search(config, partial(_searched, other, rates), limits, seed)
        proposal = search.run()
        if found is None or is_better(limits.score(proposal.forecast), limits.score(found.forecast)):
            found, best = proposal, other
    assert found is not None
    # At the length of a plan, so that both commands say the same of a recipe.
    first = simulate(what.scenario(config, rates, MOST_STEPS), seed)
    forecast = simulate(best.scenario(found.config, rates, MOST_STEPS), seed)
    yield from describe_proposal(replace(found, first=first, forecast=forecast))
    if best.ranks != what.ranks:
        yield f"# learner ranks: {best.ranks}, was {what.ranks} (--ranks)"


def _searched(what: WhatIf, rates: Rates, config: RunConfig) -> Scenario:
    return what.scenario(config, rates, SEARCH_STEPS)


def describe(scenario: Scenario, forecast: Forecast, closed: Estimate) -> Iterator[str]:
    """A forecast for people, the closed form beside it."""
    yield f"{'':<22}{'simulated':>12}{'closed form':>14}"
    yield f"{'tokens/s':<22}{forecast.tokens_per_s:>12,.1f}{closed.tokens_per_s:>14,.1f}"
    yield f"{'samples/s':<22}{forecast.samples_per_s:>12,.1f}"
    yield f"{'mean lag':<22}{forecast.lag_mean:>12.2f}{closed.lag_mean:>14.2f}"
    if scenario.rates.drift:
        yield f"{'effective sample size':<22}{forecast.ess(scenario.rates.drift):>12.4f}"
    yield f"{'seconds in the queue':<22}{forecast.queue_s:>12.2f}"
    yield f"{'the generators are' if closed.rho < 1 else 'the learner is'} the slower side"
    yield ""
    work, push, idle, other = (f"{share:.1%}" for share in forecast.learner)
    yield f"learner     work {work}, push {push}, idle {idle}, other {other}"
    work, push, idle = (f"{share:.1%}" for share in forecast.generator)
    yield f"generators  work {work}, push {push}, idle {idle}"
    yield ""
    for lag, share in enumerate(forecast.lag_histogram):
        yield f"lag {lag:<3} {share:>6.1%} {'#' * round(BAR * share)}"
    yield ""
    dropped = {name: n for name, n in sorted(forecast.tickets.items()) if name not in ("issued", "trained")}
    told = ", ".join(f"{name} {number}" for name, number in dropped.items()) or "none"
    yield f"dropped groups: {told} of {forecast.tickets['issued']}; masked tokens: {forecast.masked_tokens:,}"
    factor = 1000 / forecast.steps
    price = f", {forecast.price * factor:,.2f} in money" if forecast.price else ""
    yield f"1,000 updates: {forecast.wall_s * factor / 60:,.1f} minutes{price}"
    if scenario.replicas * scenario.max_running > scenario.concurrent:
        yield (
            f"only {scenario.concurrent} sequences are out at once: staleness allows {scenario.policy.slots} groups, "
            f"the generators hold {scenario.replicas * scenario.max_running} sequences"
        )


def describe_proposal(found: Proposal) -> Iterator[str]:
    """Before and after, and the changes as TOML with their reasons."""
    for name, forecast in (("as it is", found.first), ("proposed", found.forecast)):
        price = ""
        if forecast.price:
            price = f", {forecast.price * 1000 / forecast.steps:,.2f} in money per 1,000 updates"
        yield (
            f"{name}: {forecast.tokens_per_s:,.1f} tokens/s, mean lag {forecast.lag_mean:.2f}, idle: learner "
            f"{forecast.learner_idle:.1%}, generators {forecast.generator_idle:.1%}{price}"
        )
    yield f"{found.tried} settings tried"
    if not found.kept:
        yield "NO SETTING KEEPS THE LIMITS; this one comes nearest"
    yield ""
    if not found.changes:
        yield "# nothing to change: no setting is better by 1 %"
    section = ""
    for change in sorted(found.changes, key=lambda change: change.key):
        table, key = change.key.split(".")
        if table != section:
            section = table
            yield f"[{section}]"
        yield f"# {change.reason}"
        yield f"{key} = {change.after}  # was {change.before}"
