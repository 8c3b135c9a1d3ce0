"""The bench of staleness: its runs have the lag that they say, its judgement is of seeds against themselves."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from headway_bench.lag import Cell, ExactLag, config_of, draw, judge, measure, read_cells


@pytest.mark.parametrize("lag", [0, 3])
def test_every_batch_has_exactly_its_lag(tmp_path: Path, lag: int) -> None:
    run = ExactLag(config_of("cispo", lag, 1, 6, tmp_path / "run"))
    try:
        lags = [(record.lag_mean, record.lag_max) for record in run.steps()]
    finally:
        run.close()
    assert lags == [(min(lag, step), min(lag, step)) for step in range(6)]


def test_uncorrected_ratios_are_one_and_corrected_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway_bench.lag.LAST", 4)
    corrected, uncorrected = (measure(objective, 3, 1, 6) for objective in ("grpo", "uncorrected"))
    assert uncorrected.ess == pytest.approx(1.0, abs=1e-9)
    assert corrected.ess < 1.0 - 1e-6
    assert uncorrected.rewards[0] == corrected.rewards[0]  # the same prompts, weights and draws
    assert len(corrected.rewards) == len(corrected.seconds) == 6


def cell(objective: str, lag: int, seed: int, reward: float) -> Cell:
    return Cell(
        objective, lag, seed, 40, np.linspace(0.0, reward, 40).tolist(), list(range(40)), 0.9, lag, reward
    )


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
