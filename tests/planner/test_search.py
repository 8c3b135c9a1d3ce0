"""The search proposes what the arithmetic of a set-up says, and keeps its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.config import RunConfig
from headway.planner import Curve, Rates, Scenario, constant, scenario_of, simulate
from headway.planner.search import Limits, Search


def recipe(**sections: dict[str, object]) -> RunConfig:
    """Four groups of four per update, at most 8 sequences decoded at once."""
    base: dict[str, object] = {
        "steps": 40,
        "model": {"path": "none"},
        "env": {"name": "none"},
        "batch": {"prompts": 4, "samples": 4},
        "generator": {"max_running": 8},
        "staleness": {"max_lag": 2},
        "algo": {"filter_zero_variance": False},
    }
    return RunConfig.model_validate({**base, **sections})


def rates(decode: Curve, train_s: float) -> Rates:
    return Rates(
        hardware="none",
        model="none",
        decode=decode,
        prefill=constant(0.0),
        train=constant(train_s),
        groups=[[50] * 4, [70] * 4],
        prompt_tokens=0.0,
    )


GENERATION_BOUND = rates(Curve([(1, 0.01), (32, 0.012)]), 0.05)
LEARNER_BOUND = rates(Curve([(1, 0.001), (32, 0.0012)]), 2.0)


def search(measured: Rates, config: RunConfig, limits: Limits, price: float = 0.0) -> Search:
    def make(changed: RunConfig) -> Scenario:
        made = scenario_of(changed, measured, warmup=8)
        return replace(made, generator_price=price, rank_price=price)

    return Search(config, make, limits)


def test_where_generation_is_slow_more_is_decoded_at_once_but_not_more_than_was_measured() -> None:
    found = search(GENERATION_BOUND, recipe(), Limits()).run()
    assert found.forecast.tokens_per_s > 2 * found.first.tokens_per_s
    change = next(change for change in found.changes if change.key == "generator.max_running")
    assert (change.before, found.config.generator.max_running) == (8, change.after)
    assert 8 < change.after <= 32
    assert "tokens/s" in change.reason


def test_where_training_is_slow_only_the_batch_helps_and_more_generators_cost_money_in_vain() -> None:
    found = search(LEARNER_BOUND, recipe(), Limits(replicas=4), price=1.0).run()
    assert found.config.generator.replicas == 1
    assert [change.key for change in found.changes] == [
        "batch.prompts"
    ]  # an update costs the same whatever it holds
    assert found.config.batch.prompts == 8


def test_limits_are_kept_or_it_is_said_that_none_can() -> None:
    config = recipe(staleness={"max_lag": 8})
    free = search(LEARNER_BOUND, config, Limits()).run()
    held = search(LEARNER_BOUND, config, Limits(lag=1.0)).run()
    assert free.forecast.lag_mean > 1.0 >= held.forecast.lag_mean - 1e-9
    assert held.kept
    assert held.config.staleness.max_lag < 8
    vain = search(GENERATION_BOUND, recipe(), Limits(learner_idle=0.0)).run()
    assert not vain.kept
    assert vain.forecast.learner_idle < vain.first.learner_idle


@pytest.mark.parametrize("measured", [GENERATION_BOUND, LEARNER_BOUND])
def test_nothing_on_a_grid_around_it_is_better(measured: Rates) -> None:
    found = search(measured, recipe(), Limits()).run()
    best = 0.0
    for running in (4, 8, 16, 32):
        for max_lag in (1, 2, 4):
            for prompts in (2, 4, 8):
                config = recipe(
                    generator={"max_running": running},
                    staleness={"max_lag": max_lag},
                    batch={"prompts": prompts, "samples": 4},
                )
                best = max(best, simulate(scenario_of(config, measured, warmup=8)).tokens_per_s)
    assert found.forecast.tokens_per_s > 0.95 * best
