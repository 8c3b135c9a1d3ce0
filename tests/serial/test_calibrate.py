"""A calibration measures the parts of a real run, and its curves go through what was measured."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

from headway.cli.calibrating import (
    calibrate,
    context_of,
    decode_curve,
    decode_with_ends,
    drift_of,
    line_through,
    rates_of,
)
from headway.config import RunConfig
from headway.errors import HeadwayError
from headway.planner import read_rates, scenario_of, simulate
from headway.serial.calibrate import Measurements


def config(**sections: dict[str, object]) -> RunConfig:
    base: dict[str, object] = {
        "steps": 20,
        "model": {"path": "builtin:sort3"},
        "env": {"name": "sort", "args": {"digits": 3}},
        "batch": {"prompts": 2, "samples": 4},
        "sampling": {"max_new_tokens": 6},
        "generator": {"threads": 1, "max_running": 16},
        "learner": {"threads": 1},
    }
    return RunConfig.model_validate({**base, **sections})


def test_a_recipe_is_measured_in_seconds_and_can_be_planned_at_once(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rates.json"
    env: dict[str, object] = {
        "name": "sort",
        "args": {"digits": 3, "reward": "sum7"},
    }  # differs within a group
    recipe = config(model={"path": str(tiny_model)}, env=env, learner={"threads": 1, "lr": 1e-3})
    calibrate(recipe, path, 3.0)
    rates = read_rates(path)
    assert len(rates.groups) >= 4
    assert all(len(group) == 4 and min(group) >= 1 and max(group) <= 6 for group in rates.groups)
    assert 4 <= rates.prompt_tokens <= 6  # three digits, and what stands around them
    assert rates.push_bytes > 100_000
    assert 0 < rates.decode(4) <= rates.decode(16)
    assert 0 < rates.train(50) <= rates.train(500)
    assert len(rates.reward) > 1
    assert min(rates.reward) > 0
    assert 0 < rates.drift < 1
    assert "decode step" in capsys.readouterr().out
    forecast = simulate(scenario_of(recipe, rates))
    assert forecast.tickets["trained"] == 40


def test_curves_go_through_what_was_measured() -> None:
    assert line_through([(100, 1.1), (200, 2.1), (200, 2.1), (300, 3.1)])(400) == pytest.approx(4.1)
    assert line_through([(100, 1.0), (100, 3.0), (100, 1.1)]).points == [(0.0, 1.1)]
    assert line_through([(100, 1.0), (200, 3.0)])(50) == pytest.approx(0.7)  # not below 0 without tokens
    curve = decode_curve({n: [0.01 * n] * 3 for n in range(1, 33)})
    assert [curve(n) for n in (4, 16, 30)] == pytest.approx([0.04, 0.16, 0.30], rel=0.1)
    noisy = decode_curve({1: [0.02], 2: [0.01], 3: [0.03]})
    assert noisy(2) >= noisy(1)


def test_the_end_of_a_completion_is_spread_over_its_tokens() -> None:
    decode = defaultdict[int, list[float]](list, {8: [0.010] * 3, 16: [0.018] * 3})
    ends = [(16, 16, 0.018 + 16 * 0.002), (8, 4, 0.010 + 4 * 0.002)]
    with_ends = decode_with_ends(Measurements(decode=decode, ends=ends, lengths=[[4, 4], [4, 4]]))
    assert with_ends(16) == pytest.approx(0.018 + 16 * 0.002 / 4)
    assert with_ends(8) == pytest.approx(0.010 + 8 * 0.002 / 4)
    short = decode_with_ends(Measurements(ends=[(16, 16, 0.05), (4, 4, 0.02)], lengths=[[2, 2]]))
    assert (short(16), short(4)) == pytest.approx((0.05, 0.02))


def test_context_is_what_grows_with_it_beside_the_sequences() -> None:
    turns = [(n, c, 0.01 + 1e-4 * n + 2e-7 * n * c) for n in (1, 8, 32) for c in (10.0, 50.0, 400.0)]
    assert context_of(turns) == pytest.approx(2e-7, rel=1e-6)
    assert context_of([(n, c, 0.01 - 1e-8 * n * c) for n, c, _ in turns]) == 0.0
    assert context_of(turns[:2]) == 0.0


def test_drift_is_the_slope_of_the_logarithm() -> None:
    assert drift_of([(lag, math.exp(-0.02 * lag)) for lag in range(8)]) == pytest.approx(0.02)
    assert drift_of([(0, 0.5), (1, 0.0)]) == 0.0
    assert drift_of([(3, 1.0 + 1e-7)]) == 0.0


def test_nothing_measured_is_no_calibration() -> None:
    with pytest.raises(HeadwayError, match="no decode step"):
        rates_of(config(), Measurements())
