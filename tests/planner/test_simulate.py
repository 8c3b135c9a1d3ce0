"""The simulated run against arithmetic that can be done by hand, and against the promises of the policies."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.planner import Curve, Forecast, Rates, Scenario, constant, estimate, read_rates, simulate
from headway.staleness import POLICIES, make_policy

LENGTH = 100


def rates(**changes: object) -> Rates:
    """Ten ms a decode step whatever runs, completions of 100 tokens, half a second an update."""
    base = Rates(
        hardware="none",
        model="none",
        decode=constant(0.01),
        prefill=constant(0.0),
        train=constant(0.5),
        groups=[[LENGTH] * 4],
        prompt_tokens=0.0,
    )
    return msgspec.structs.replace(base, **changes)


def scenario(measured: Rates, policy: str = "window", max_lag: int = 2, **changes: object) -> Scenario:
    values: dict[str, object] = {"samples": 4, "steps": 40, "replicas": 1, "max_running": 64, **changes}
    slots = values.pop("slots", None)
    interval = values.pop("interval", 1)
    chosen = make_policy(policy, max_lag, 4, slots=slots, push_interval=interval)  # type: ignore[arg-type]
    return Scenario(measured, chosen, **values)  # type: ignore[arg-type]


def test_a_synchronous_run_takes_generation_plus_training_plus_push() -> None:
    measured = rates(publish=constant(0.05), stage=constant(0.1), apply=constant(0.02), turn=0.03)
    forecast = simulate(scenario(measured, max_lag=0))
    generate_s, train_s = LENGTH * 0.01, 0.5
    # The learner's own other work passes while the push is on its way.
    cycle_s = generate_s + train_s + 0.05 + 0.1 + 0.02
    wall_s = 40 * cycle_s - (0.05 + 0.1 + 0.02)
    assert forecast.wall_s == pytest.approx(wall_s, rel=1e-6)
    assert forecast.tokens_per_s == pytest.approx(40 * 16 * LENGTH / wall_s, rel=1e-6)
    assert forecast.lag_histogram == [1.0]
    assert forecast.generator[0] == pytest.approx(40 * generate_s / wall_s, rel=1e-6)


def test_the_slower_side_sets_the_pace_and_the_other_one_idles() -> None:
    by_learner = simulate(scenario(rates(train=constant(3.0))))
    assert by_learner.tokens_per_s == pytest.approx(16 * LENGTH / 3.0, rel=0.03)
    assert by_learner.learner_idle < 0.03 < 0.5 < by_learner.generator_idle
    assert by_learner.lag_mean == pytest.approx(1.9, abs=0.1)  # the last of three batches that are out
    by_generator = simulate(scenario(rates(train=constant(0.1)), max_running=16))
    assert by_generator.tokens_per_s == pytest.approx(16 * LENGTH / 1.0, rel=0.03)
    assert by_generator.generator_idle < 0.12 < 0.5 < by_generator.learner_idle


def test_twice_the_generators_do_twice_the_work_while_the_learner_keeps_up() -> None:
    one, two = (
        simulate(scenario(rates(train=constant(0.01)), max_lag=4, max_running=8, replicas=n)) for n in (1, 2)
    )
    assert two.tokens_per_s == pytest.approx(2 * one.tokens_per_s, rel=0.05)


def test_prefill_pauses_and_contention_cost_what_they_cost() -> None:
    plain = simulate(scenario(rates(train=constant(0.0)), max_lag=0))
    prefill = simulate(scenario(rates(train=constant(0.0), prefill=constant(0.25)), max_lag=0))
    assert prefill.wall_s - plain.wall_s == pytest.approx(40 * 0.25, rel=1e-3)
    beside = simulate(scenario(rates(train=constant(3.0), decode_beside=2.0, train_beside=1.5)))
    alone = simulate(scenario(rates(train=constant(3.0), decode_beside=2.0, train_beside=1.5), beside=False))
    assert 1.0 < beside.wall_s / alone.wall_s < 1.5


def test_flat_groups_are_generated_for_nothing() -> None:
    measured = rates(train=constant(0.01), zero_variance=0.5)
    forecast = simulate(scenario(measured, max_running=16, steps=100))
    assert forecast.tickets["zero_variance"] / forecast.tickets["issued"] == pytest.approx(0.5, abs=0.06)
    assert forecast.tokens_per_s == pytest.approx(0.5 * 16 * LENGTH / 1.0, rel=0.12)


def test_lost_generators_cost_their_tickets_and_their_time() -> None:
    sound = simulate(scenario(rates(train=constant(0.01)), replicas=2, max_running=16, steps=200))
    lossy = simulate(
        scenario(
            rates(train=constant(0.01)), replicas=2, max_running=16, steps=200,
            losses_per_hour=120.0, restart_s=10.0,
        )
    )  # fmt: skip
    assert lossy.tickets["generator_lost"] > 0
    assert sound.tokens_per_s > lossy.tokens_per_s > 0.5 * sound.tokens_per_s


def random_rates(rng: random.Random) -> Rates:
    groups = [[max(1, int(rng.lognormvariate(3, 1))) for _ in range(4)] for _ in range(50)]
    return rates(
        groups=groups,
        decode=Curve([(1, 0.01), (64, rng.uniform(0.01, 0.05))]),
        train=Curve([(0, rng.uniform(0.01, 1.0)), (2000, rng.uniform(1.0, 3.0))]),
        stage=constant(rng.choice([0.0, 0.5, 3.0])),
        apply=constant(rng.choice([0.0, 0.1])),
        reward=[0.0, rng.uniform(0.0, 2.0)],
        zero_variance=rng.choice([0.0, 0.4]),
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), policy=st.sampled_from(POLICIES), max_lag=st.integers(0, 4),
    replicas=st.integers(1, 4), mode=st.sampled_from(["in_flight", "drain", "resume"]),
    losses=st.sampled_from([0.0, 200.0]),
)  # fmt: skip
def test_every_policy_keeps_its_promises_and_every_second_is_accounted_for(
    seed: int, policy: str, max_lag: int, replicas: int, mode: str, losses: float
) -> None:
    rng = random.Random(seed)
    what = scenario(
        random_rates(rng), policy, max_lag, steps=15, replicas=replicas, mode=mode, max_running=rng.randint(4, 40),
        losses_per_hour=losses, restart_s=1.0,
    )  # fmt: skip
    forecast = simulate(what, seed)
    assert forecast.tickets["trained"] == 15 * 4
    assert len(forecast.lag_histogram) - 1 <= max_lag
    assert sum(forecast.lag_histogram) == pytest.approx(1.0)
    assert sum(forecast.learner) == pytest.approx(1.0)
    assert all(-1e-9 <= share <= 1.0 + 1e-6 for share in (*forecast.learner, *forecast.generator))
    assert sum(forecast.generator) == pytest.approx(1.0, abs=0.02)
    if policy in ("window", "wait"):
        assert "stale" not in forecast.tickets
        assert forecast.masked_tokens == 0  # the bound is kept by admission alone


def test_the_closed_form_agrees_where_its_assumptions_hold() -> None:
    for train_s in (0.1, 4.0):
        what = scenario(rates(train=constant(train_s)), max_lag=4, max_running=16, steps=100)
        assert estimate(what).tokens_per_s == pytest.approx(simulate(what).tokens_per_s, rel=0.1)


def test_a_calibration_file_comes_back_as_it_was_and_a_bad_one_is_refused_by_name(tmp_path: Path) -> None:
    measured = random_rates(random.Random(1))
    path = tmp_path / "rates.json"
    measured.write(path)
    assert read_rates(path) == measured
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="not a calibration"):
        read_rates(path)
    msgspec.structs.replace(measured, format=9).write(path)
    with pytest.raises(ConfigError, match="format 9"):
        read_rates(path)
    with pytest.raises(ConfigError, match="headway calibrate"):
        read_rates(tmp_path / "none.json")


def test_a_curve_goes_through_its_points_and_is_never_negative() -> None:
    curve = Curve([(1, 0.1), (3, 0.3), (4, 0.3)])
    assert [curve(x) for x in (1, 2, 3, 3.5, 9)] == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])
    assert curve(-9) == 0.0
    for points in ([], [(1.0, 1.0), (1.0, 2.0)]):
        with pytest.raises(ValueError, match="increasing x"):
            Curve(points)


def test_the_same_seed_gives_the_same_forecast() -> None:
    what = scenario(random_rates(random.Random(2)))
    first: Forecast = simulate(what, 5)
    assert first == simulate(what, 5) != simulate(what, 6)


def test_reward_workers_that_are_too_few_set_the_pace() -> None:
    slow = rates(reward=[0.25])
    one = simulate(scenario(slow))
    assert one.samples_per_s == pytest.approx(4.0, rel=0.05)
    assert one.learner_idle > 0.5
    four = simulate(scenario(slow, reward_workers=4))
    assert four.samples_per_s == pytest.approx(16.0, rel=0.05)
    enough = simulate(scenario(slow, reward_workers=64))
    assert enough.samples_per_s > 1.2 * four.samples_per_s


def test_longer_completions_bring_context_and_longer_steps() -> None:
    measured = rates(decode=Curve([(1, 0.01), (64, 0.02)]), context=1e-6, prompt_tokens=20.0)
    assert measured.mean_context == pytest.approx(20 + LENGTH / 2)
    twice = measured.with_lengths(factor=2.0)
    assert twice.groups == [[2 * LENGTH] * 4]
    assert twice.decode(64) == pytest.approx(0.02 + 64 * 1e-6 * LENGTH / 2)
    assert measured.with_lengths() == measured


def test_a_tail_is_the_longest_hundredth() -> None:
    measured = rates(groups=[list(range(1, 101)), list(range(101, 201))])
    lengths = [length for group in measured.with_lengths(tail=32_768).groups for length in group]
    assert sorted(lengths) == [*range(1, 199), 32_768, 32_768]
    short = rates().with_lengths(tail=500)  # of fewer than a hundred the longest
    assert max(max(group) for group in short.groups) == 500
