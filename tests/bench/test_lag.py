"""The bench of staleness: its runs have the lag that they say, its judgement is of seeds against themselves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from headway_bench.lag import ExactLag, config_of, main, measure, parse_options
from headway_bench.lag_cells import Cell, Key, draw, judge, read_cells, reward_at


@pytest.mark.parametrize("lag", [0, 3])
def test_every_batch_has_exactly_its_lag(tmp_path: Path, lag: int) -> None:
    run = ExactLag(config_of("cispo", lag, 1, 6, tmp_path / "run"))
    try:
        lags = [(record.lag_mean, record.lag_max) for record in run.steps()]
    finally:
        run.close()
    assert lags == [(min(lag, step), min(lag, step)) for step in range(6)]


def test_uncorrected_ratios_are_one_and_corrected_ones_are_not() -> None:
    corrected, uncorrected = (
        measure(Key(objective, 3, 1, 3, 6, "code")) for objective in ("grpo", "uncorrected")
    )
    assert uncorrected.ess == pytest.approx(1.0, abs=1e-9)
    assert corrected.ess < 1.0 - 1e-6
    assert uncorrected.rewards[0] == corrected.rewards[0]  # the same prompts, weights and draws
    assert len(corrected.rewards) == len(corrected.seconds) == 6


def cell(objective: str, lag: int, seed: int, reward: float) -> Cell:
    rewards = np.linspace(0.0, reward, 60).tolist()
    return Cell(objective, lag, seed, 50, 60, "code", rewards, list(range(60)), 0.9, lag, reward)


def test_a_seed_is_compared_with_itself() -> None:
    cells = [
        cell("cispo", 0, 0, 0.8),
        cell("cispo", 4, 0, 0.4),
        cell("cispo", 0, 1, 0.5),
        cell("cispo", 4, 1, 0.5),
    ]
    zero, four = judge([*cells, cell("cispo", 4, 2, 0.9)])
    assert (zero.lag, zero.shares) == (0, [1.0, 1.0])
    assert (four.rewards, four.shares) == ([0.4, 0.5, 0.9], [0.5, 1.0])


def test_finished_cells_are_found_again_and_a_torn_one_is_not(tmp_path: Path) -> None:
    path, kept = tmp_path / "cells.jsonl", cell("cispo", 4, 0, 0.4)
    line = msgspec.json.encode(kept)
    path.write_bytes(line + b"\n" + line[:30])
    assert read_cells(path) == {kept.key: kept}
    assert read_cells(tmp_path / "none") == {}


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw([cell("cispo", lag, seed, 0.5) for lag in (0, 4) for seed in (0, 1)], tmp_path / "lag.svg")
    assert (tmp_path / "lag.svg").read_text().startswith("<?xml")


def test_a_reward_is_of_the_weights_that_sampled_not_of_the_update_that_trained() -> None:
    """Update u (from 1) trains what version max(0, u - 1 - lag) sampled."""
    for lag in (0, 4):
        version_of = [max(0, update - 1 - lag) for update in range(1, 121)]
        assert reward_at(version_of, lag, 100) == sum(range(50, 100)) / 50


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--lags", "4,8"], "0 is among them"),
        (["--lags", "0,x"], "whole numbers"),
        (["--lags", "0,-1"], "nothing below"),
        (["--objectives", "cispo,best"], "'best': expected cispo"),
        (["--seeds", "0"], "--seeds is at least 1"),
        (["--steps", "10"], "--steps 50"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)
    assert named in capsys.readouterr().err


def test_the_exit_status_is_of_the_aims_and_finished_cells_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway_bench.lag.code_of", lambda _: "code")
    path = tmp_path / "cells.jsonl"
    arguments = [
        "--lags",
        "0,4",
        "--objectives",
        "cispo",
        "--seeds",
        "1",
        "--steps",
        "50",
        "--cells",
        str(path),
    ]
    for reward, status in ((0.7, 1), (0.78, 0)):
        cells = [
            msgspec.structs.replace(cell("cispo", lag, 0, value), updates=58)
            for lag, value in ((0, 0.8), (4, reward))
        ]
        path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in cells))
        assert main(arguments) == status
