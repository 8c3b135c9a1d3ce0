"""One side of a recipe alone: the other one takes no time, and what is measured is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway_bench.alone.bench import parse, run_bench
from headway_bench.alone.child import GENERATE, LEARN
from headway_bench.alone.recorded import Recorded, read_recorded
from headway_bench.harness import read_rows

RECIPE = """
name = "small"

[model]
path = "builtin:sort3"

[env]
name = "sort"
args = {digits = 3}

[batch]
prompts = 4
samples = 4

[sampling]
max_new_tokens = 6

[generator]
max_running = 16
threads = 1

[learner]
threads = 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize("side", [GENERATE, LEARN])
def test_a_side_alone_hardly_waits_for_the_other(side: str, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert run_bench(side, [str(recipe), "--seconds", "3", "--rounds", "1", "--out", str(out)])
    (row,) = read_rows(out)
    assert row.p50 > 0
    assert 0.05 < row.ratios["of the bare work"].p50 < 2.0
    assert row.ratios["idle"].p50 < 0.5
    assert list(tmp_path.glob("runs")) == []


def test_recorded_groups_come_back_as_they_were(recipe: Path, tmp_path: Path) -> None:
    from headway.serial.calibrate import Calibration

    _, config = parse(LEARN, [str(recipe)])
    calibration = Calibration(config, 1.0)
    calibration.run()
    recorded = Recorded.of(calibration.groups)
    assert 0 < len(recorded.prompts) <= len(calibration.groups)
    recorded.write(tmp_path / "recorded")
    back = read_recorded(tmp_path / "recorded")
    assert back.prompts == recorded.prompts
    for group in calibration.groups:
        members = back.answers()[tuple(group.ticket.prompt_ids)]
        assert len(members) == config.batch.samples
        assert all(len(member.token_ids) == len(member.logprobs) > 0 for member in members)


def test_a_synchronous_recipe_and_a_missing_one_are_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headway_bench.alone.bench import generate, learn

    assert learn([str(recipe), "--staleness.max_lag", "0"]) == 2
    assert "staleness.max_lag: 0 lets no side run alone" in capsys.readouterr().err
    assert generate([]) == 2
    assert "no recipe was given" in capsys.readouterr().err
