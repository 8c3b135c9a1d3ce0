"""Claims are judged by ratios within rounds, rewards by the noise between seeds."""

import pytest

from headway_bench.rivals.workload import Report
from headway_bench.verdict import LEAST_RATIO, Outcome, findings


def outcome(
    contestant: str, turn: int, samples_per_s: float, reward: float = 0.88, lag: int = 0, workload: str = "w1"
) -> Outcome:
    report = Report("completed", 100, 12800 / samples_per_s, samples_per_s, reward, lag)
    return Outcome(workload, contestant, turn, 42 + turn, 0.0, report)


def test_the_thresholds_are_those_promised():
    assert LEAST_RATIO == {"trl_async": 1.3, "trl_two": 2.0, "trl_default": 2.5, "trl_threads": 2.5}


def test_every_claim_is_checked_on_both_workloads():
    outcomes = [
        outcome(name, turn, rate, workload=workload)
        for workload in ("w1", "w2")
        for turn in range(3)
        for name, rate in (
            ("headway", 1000.0),
            ("trl_async", 500.0),
            ("trl_two", 300.0),
            ("trl_default", 250.0),
        )
    ]
    found = findings(outcomes)
    assert all(finding.held for finding in found)
    assert len(found) == 2 * 3 + 1 + 2  # ratios; the reward of w1; lags
    assert found[0].found == "2.00 (2.00 to 2.00)x"


def test_the_median_of_the_ratios_decides_not_the_ratio_of_the_medians():
    # Per round 1.2, 1.25, 2.0: the median is below 1.3, though headway's median rate is 1.5 times the
    # rival's.
    ours, theirs = (600.0, 250.0, 1000.0), (500.0, 200.0, 500.0)
    outcomes = [outcome("headway", turn, rate) for turn, rate in enumerate(ours)]
    outcomes += [outcome("trl_async", turn, rate) for turn, rate in enumerate(theirs)]
    ratio = findings(outcomes)[0]
    assert not ratio.held
    assert ratio.found.startswith("1.25 ")


@pytest.mark.parametrize(("reward", "held"), [(0.88, True), (0.86, True), (0.80, False), (0.99, True)])
def test_a_reward_below_the_rivals_by_more_than_seed_noise_fails(reward: float, held: bool):
    outcomes = [outcome("headway", turn, 1000.0, reward + 0.005 * turn) for turn in range(5)]
    outcomes += [outcome("trl_default", turn, 250.0, 0.87 + 0.01 * turn) for turn in range(5)]
    found = [finding for finding in findings(outcomes) if "reward" in finding.claim]
    assert [finding.held for finding in found] == [held]


def test_noisy_seeds_widen_what_counts_as_equal():
    rewards = (0.6, 0.9, 0.7, 0.95, 0.65)
    outcomes = [outcome("headway", turn, 1000.0, reward - 0.05) for turn, reward in enumerate(rewards)]
    outcomes += [outcome("trl_default", turn, 250.0, reward) for turn, reward in enumerate(rewards)]
    assert all(finding.held for finding in findings(outcomes))


def test_a_lag_above_the_rivals_bound_fails():
    outcomes = [outcome("headway", turn, 1000.0, lag=turn) for turn in range(6)]
    lag = findings(outcomes)[-1]
    assert lag.claim == "w1: lag at most 4"
    assert not lag.held
    assert lag.found == "5"


def test_without_headway_nothing_is_claimed():
    assert findings([outcome("trl_async", 0, 500.0)]) == []


def test_an_absent_rival_is_not_judged():
    found = findings([outcome("headway", 0, 1000.0), outcome("trl_two", 0, 400.0)])
    assert [finding.claim.split(":")[1].split()[0] for finding in found] == ["at", "reward", "lag"]
