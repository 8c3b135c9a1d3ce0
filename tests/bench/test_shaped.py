"""Shaped runs: durations and lengths are what the shape says, and what is reported is what the rows hold."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from headway.planner import Curve, Forecast, constant
from headway_bench.shaped.asynchronous import CONTESTANTS, DECODE, SIGMA, Setup
from headway_bench.shaped.bench import Compared, Overhead, scenario
from headway_bench.shaped.cases import CASES
from headway_bench.shaped.child import Pace
from headway_bench.shaped.play import Measured, config_of, play
from headway_bench.shaped.shape import Shape, ShapeFile, read_shape

SHAPE = Shape(decode=constant(0.01), train=constant(0.05), mean=50, sigma=SIGMA, longest=10**6)


def test_lengths_are_log_normal_with_the_mean_and_the_tail_that_were_asked_for() -> None:
    lengths = sorted(SHAPE.length(0, ticket, 0) for ticket in range(20_000))
    assert statistics.fmean(lengths) == pytest.approx(50, rel=0.04)
    assert lengths[int(0.99 * len(lengths))] / statistics.fmean(lengths) == pytest.approx(6.0, rel=0.07)
    assert SHAPE.length(1, 2, 3) == SHAPE.length(1, 2, 3) != SHAPE.length(2, 2, 3)


def test_a_shape_comes_back_from_its_file_and_gives_its_rates(tmp_path: Path) -> None:
    path = tmp_path / "shape.json"
    ShapeFile(SHAPE, 7).write(path)
    assert read_shape(path) == ShapeFile(SHAPE, 7)
    rates = SHAPE.rates(7, 4, 3, 5.0)
    assert rates.groups == [[SHAPE.length(7, ticket, member) for member in range(4)] for ticket in range(3)]
    assert (rates.decode, rates.train(10**6)) == (SHAPE.decode, 0.05)


def test_queued_work_begins_where_the_work_before_it_ended_and_catches_up() -> None:
    pace = Pace()
    began_s = time.perf_counter()
    pace.stretch(began_s - 1.0, 1.03)  # ends 0.03 s from here
    pace.busy = True
    for _ in range(4):
        pace.stretch(time.perf_counter() + 0.01, 0.02)  # whose host comes late every time
    ended_s = time.perf_counter()
    assert ended_s >= began_s + 0.03 + 4 * 0.02
    assert (
        ended_s <= began_s + 0.03 + 4 * 0.02 + 0.02
    )  # 0.04 s of lateness caught up, besides the last wake-up
    pace.busy = False
    pace.stretch(time.perf_counter(), 0.02)
    assert time.perf_counter() >= ended_s + 0.02


def test_every_case_is_a_recipe_that_the_planner_takes() -> None:
    assert len(CASES) >= 8
    for case in CASES:
        what = scenario(case, 10, 2, 0, Overhead(0.01, 0.02))
        assert what.rates.turn == 0.01
        assert what.rates.publish(0) == pytest.approx(case.shape.publish + 0.02)
        assert len(what.rates.groups) > 10 * what.policy.groups_per_step
        assert config_of(case.recipe(10)).steps == 10


def forecast(tokens_per_s: float, lag: list[float]) -> Forecast:
    return Forecast(
        wall_s=1.0, steps=1, tokens_per_s=tokens_per_s, samples_per_s=1.0, lag_histogram=lag,
        learner=(0.5, 0.0, 0.5, 0.0), generator=(1.0, 0.0, 0.0), queue_s=0.0, tickets={}, masked_tokens=0, price=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("real", "holds"),
    [
        (Measured(100.0, 0.5, 0.5, 0.0), True),
        (Measured(89.0, 0.5, 0.5, 0.0), False),
        (Measured(100.0, 0.85, 0.5, 0.0), False),
        (Measured(100.0, 0.5, 0.44, 0.0), False),
        (Measured(100.0, 0.5, 0.5, 0.06), False),
    ],
)
def test_the_median_of_the_seeds_is_held_to_every_bound(real: Measured, holds: bool) -> None:
    planned = [forecast(100.0, [0.5, 0.5])] * 3
    outlier = Measured(1.0, 9.0, 9.0, 9.0)
    assert Compared(CASES[0].name, planned, [real, outlier, real]).holds is holds


def test_an_update_takes_half_of_a_synchronous_rounds_generation() -> None:
    setup = Setup(8, 2, 20, 4)
    shape = setup.shape()
    groups = shape.rates(0, 2, 20 * 8, 5.0).groups
    longest = [max(max(group) for group in groups[at : at + 8]) for at in range(0, 160, 8)]
    assert shape.train(0) == pytest.approx(statistics.fmean(longest) * DECODE(8) / 2, rel=0.05)
    assert [each.max_lag for each in CONTESTANTS].count(0) == 1


@pytest.mark.slow
def test_a_real_run_takes_the_time_of_its_sleeps() -> None:
    shape = Shape(decode=Curve([(1, 0.01), (16, 0.02)]), train=constant(0.3), mean=10, sigma=0.0, longest=20)
    sections = CASES[0].recipe(8) | {"staleness": {"max_lag": 0}}
    real = play(shape, sections, warmup=2)
    round_s = 10 * 0.02 + 0.3
    assert real.tokens_per_s <= 16 * 10 / round_s * 1.02
    assert real.tokens_per_s >= 16 * 10 / (round_s + 0.5)
    assert real.lag_mean == 0.0
