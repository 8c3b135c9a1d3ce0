"""The bench of whole runs over max_lag and batch: real cells, and a front that nothing else beats."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.tune.outcome import Outcome
from headway_bench.harness import read_rows
from headway_bench.pareto import Cell, Measured, Summary, draw, front, main, parse


def summary(prompts: int, max_lag: int, rate: float, lag: float, ess: float) -> Summary:
    outcome = Outcome(rate, 1.0, lag, 0.1, 0.1, 0.5, 10)
    return Summary(Cell(prompts, max_lag), {0: Measured(outcome, ess)})


def test_the_front_is_what_nothing_of_the_same_batch_beats() -> None:
    slow, fast = summary(4, 0, 100.0, 0.0, 1.0), summary(4, 2, 200.0, 1.5, 0.98)
    beaten, alone = summary(4, 4, 190.0, 3.0, 0.97), summary(8, 4, 150.0, 3.0, 0.97)
    same = summary(4, 3, 200.0, 1.5, 0.98)
    assert front([slow, fast, beaten, alone, same]) == [slow, fast, alone, same]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    cells = [summary(4, 0, 100.0, 0.0, 1.0), summary(4, 2, 200.0, 1.5, 0.98), summary(8, 2, 220.0, 1.4, 0.97)]
    draw(cells, "title", tmp_path / "loop.svg")
    text = (tmp_path / "loop.svg").read_text()
    assert "<!--  8 prompts -->" in text


def test_cells_are_real_runs(tmp_path: Path) -> None:
    recipe, out = tmp_path / "small.toml", tmp_path / "rows.jsonl"
    recipe.write_text(
        '[model]\npath = "builtin:sort3"\n[env]\nname = "sort"\nargs = {digits = 3}\n'
        "[batch]\nprompts = 4\nsamples = 4\n[sampling]\nmax_new_tokens = 6\n"
    )
    words = [str(recipe), "--lags", "0,2", "--prompts", "4", "--seconds", "3", "--out", str(out)]
    assert main(words) == 0
    synchronous, asynchronous = read_rows(out)
    assert synchronous.ratios["lag_mean"].p50 == 0.0 < asynchronous.ratios["lag_mean"].p50 <= 2.0
    assert 0.5 < asynchronous.ratios["ess"].p50 <= 1.0 + 1e-6


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--lags", "a"], "--lags 'a'"), (["--prompts", "0"], "at least 1"), (["--seconds", "0"], "above 0")],
)
def test_wrong_options_are_named(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["recipe.toml", *words])
    assert told in capsys.readouterr().err


def test_a_cell_that_the_recipe_forbids_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text('[model]\npath = "builtin:sort3"\n[env]\nname = "sort"\n[push]\ninterval = 2\n')
    assert main([str(recipe), "--lags", "0,2"]) == 2
    assert "prompts, max_lag 0" in capsys.readouterr().err
