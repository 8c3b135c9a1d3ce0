"""What a plan predicts, and the closed-form estimate beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.planner.scenario import Scenario


@dataclass(frozen=True)
class Forecast:
    """One simulated run.

    Attributes:
        wall_s: from the first ticket to the end of the last optimizer step; steps: made. Both, tickets and price
            hold the warm-up too.
        tokens_per_s, samples_per_s: trained.
        lag_histogram: share of the trained tokens by lag.
        learner: shares of its time at (work, push, idle, other); generator: (work, push, idle), mean over all.
        queue_s: mean seconds from a group's reward to its consumption.
        tickets: issued, trained, and dropped by reason; masked_tokens: too old, of groups that were trained.
        price: of the whole run.
    """

    wall_s: float
    steps: int
    tokens_per_s: float
    samples_per_s: float
    lag_histogram: list[float]
    learner: tuple[float, ...]
    generator: tuple[float, float, float]
    queue_s: float
    tickets: dict[str, int]
    masked_tokens: int
    price: float

    @property
    def lag_mean(self) -> float:
        """Of a trained token, in optimizer steps."""
        return sum(lag * share for lag, share in enumerate(self.lag_histogram))

    def ess(self, drift: float) -> float:
        """Effective sample size of the ratios as a share, where each update of lag lowers its logarithm by `drift`."""
        return sum(share * math.exp(-drift * lag) for lag, share in enumerate(self.lag_histogram))

    @property
    def learner_idle(self) -> float:
        """Share of its time that the learner waits for groups."""
        return self.learner[2]

    @property
    def generator_idle(self) -> float:
        """Share of their time that the generators have nothing to decode."""
        return self.generator[2]

    @property
    def wasted(self) -> float:
        """Share of the issued tickets that were dropped."""
        dropped = sum(n for name, n in self.tickets.items() if name not in ("issued", "trained"))
        return dropped / max(1, self.tickets.get("issued", 0))


@dataclass(frozen=True)
class Estimate:
    """The closed form, from means alone.

    Attributes:
        rho: generation rate over training rate, in trajectories.
        tokens_per_s: the slower side's; lag_mean: of a token.
    """

    rho: float
    tokens_per_s: float
    lag_mean: float


def estimate(scenario: Scenario) -> Estimate:
    """Rates and lag without simulating.

    With C concurrent rollouts, B trajectories per update, M = longest over mean duration of a rollout and q = queue
    length / B: mean lag is about C M / B + rho where generation is the slower side (rho < 1), and
    C M / (rho B) + (2 q + rho - 1) / (2 rho) where training is. The queue is what the slots leave beyond C.
    """
    rates, policy = scenario.rates, scenario.policy
    batch = policy.groups_per_step * scenario.samples
    running = min(scenario.max_running, max(1.0, policy.slots * scenario.samples / scenario.replicas))
    useful = 1.0 - (rates.zero_variance if scenario.filter_flat else 0.0)
    generated = scenario.replicas * running / max(1e-9, rates.decode(running)) / rates.mean_length * useful
    forwarded = batch * rates.mean_length + policy.groups_per_step * rates.prompt_tokens
    update_s = rates.train(forwarded / scenario.ranks) + rates.publish(rates.push_bytes) + rates.turn
    trained = batch / max(1e-9, update_s)
    rho = generated / trained
    longest = sum(max(group) for group in rates.groups) / len(rates.groups)
    concurrent = scenario.replicas * running
    rollouts = concurrent * longest / rates.mean_length / batch
    if rho < 1:
        lag = rollouts + rho
    else:
        queue = max(0.0, policy.slots * scenario.samples - concurrent) / batch
        lag = rollouts / rho + (2 * queue + rho - 1) / (2 * rho)
    return Estimate(rho, min(generated, trained) * rates.mean_length, min(lag, float(policy.max_lag)))
