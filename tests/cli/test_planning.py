"""`headway plan` as people see it."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import msgspec
import pytest

from headway.cli import main
from headway.cli.planning import WhatIf
from headway.cli.running import recipe
from headway.planner import Curve, Rates, constant, read_rates

RECIPE = """
steps = 30
[model]
path = "none"
[env]
name = "none"
[batch]
prompts = 4
samples = 4
[generator]
max_running = 8
[staleness]
max_lag = 2
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    recipe, rates = tmp_path / "recipe.toml", tmp_path / "rates.json"
    recipe.write_text(RECIPE)
    Rates(
        hardware="a machine",
        model="a model",
        decode=Curve([(1, 0.01), (32, 0.012)]),
        prefill=constant(0.0),
        train=constant(0.05),
        groups=[[50] * 4],
        stage=Curve([(0, 0.1)]),
        push_bytes=10**9,
    ).write(rates)
    return [str(recipe), "--rates", str(rates)]


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    shown = capsys.readouterr()
    return ended.value.code, shown.out + shown.err


def rate_of(text: str) -> float:
    return float(text.split("tokens/s")[1].split()[0].replace(",", ""))


def test_a_plan_shows_simulation_and_closed_form_and_money(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run([*files, "--generator-price", "2", "--rank-price", "3"], capsys)
    assert code == 0
    assert "a machine" in text
    assert "the generators are the slower side" in text
    assert rate_of(text) == pytest.approx(8 / 0.01045, rel=0.03)
    line = next(line for line in text.splitlines() if line.startswith("1,000 updates"))
    minutes, price = float(line.split()[2]), float(line.split()[4])
    assert price == pytest.approx(minutes / 60 * 5, rel=0.02)


def test_what_if_changes_the_answer_its_way(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plain, more, slow, lossy = (
        rate_of(run([*files, *words], capsys)[1])
        for words in (
            [], ["--replicas", "2"], ["--link-gbit", "1", "--push.mode", "drain"],
            ["--losses-per-hour", "300", "--restart-s", "20"],
        )
    )  # fmt: skip
    assert more > 1.5 * plain
    assert slow < 0.8 * plain  # 8 s for every push
    assert lossy < 0.9 * plain


def test_as_it_is_is_what_the_plan_says(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    longer = [*files, "--steps", "150"]
    rate = next(line for line in run(longer, capsys)[1].splitlines() if line.startswith("tokens/s")).split()[
        1
    ]
    assert f"as it is: {rate} tokens/s" in run([*longer, "--optimise"], capsys)[1]


def test_updates_of_very_many_samples_are_simulated_less_often(files: list[str]) -> None:
    rates = read_rates(Path(files[2]))
    steps = {}
    for prompts in (4, 10_000, 100_000):
        config = recipe([files[0], "--steps", "500", "--batch.prompts", str(prompts)])
        steps[prompts] = WhatIf().scenario(config, rates, 200).steps
    assert steps == {4: 200, 10_000: 10, 100_000: 8}


def test_a_proposal_is_toml_for_the_recipe(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run([*files, "--optimise", "--most-lag", "2"], capsys)
    assert code == 0
    changes = tomllib.loads(text.split("settings tried")[1])
    assert changes["generator"]["max_running"] > 8
    assert "instead of" in text


def test_wrong_use_is_refused_by_name(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run([*files, "--most-lag", "2"], capsys)
    assert (code, "--optimise" in text) == (2, True)
    code, text = run([files[0], "--rates", "none.json"], capsys)
    assert (code, "headway calibrate" in text) == (2, True)


def test_learner_ranks_are_searched_where_the_learner_is_slow(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "slow.json"
    rates = read_rates(tmp_path / "rates.json")
    msgspec.structs.replace(rates, train=Curve([(0.0, 0.0), (1000.0, 5.0)])).write(slow)
    code, text = run([files[0], "--rates", str(slow), "--optimise", "--most-ranks", "3"], capsys)
    assert (code, "# learner ranks: 3, was 1" in text) == (0, True)
    code, text = run([*files, "--optimise", "--most-ranks", "3"], capsys)
    assert (code, "learner ranks" in text) == (0, False)


def test_an_effective_sample_size_is_kept(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run([*files, "--optimise", "--least-ess", "0.9"], capsys)
    assert (code, "--least-ess" in text and "calibrate" in text) == (2, True)
    drifting = tmp_path / "drifting.json"
    msgspec.structs.replace(read_rates(tmp_path / "rates.json"), drift=0.1).write(drifting)
    words = [files[0], "--rates", str(drifting)]
    text = run(words, capsys)[1]
    lag, ess = (float(text.split(name)[1].split()[0]) for name in ("mean lag", "effective sample size"))
    assert math.exp(-0.1 * lag) - 0.01 < ess < 1.0
    free, kept = (run([*words, "--optimise", *more], capsys)[1] for more in ([], ["--least-ess", "0.95"]))
    lags = [float(each.split("proposed:")[1].split("mean lag ")[1].split(",")[0]) for each in (free, kept)]
    assert lags[1] <= -math.log(0.95) / 0.1 + 0.05 < lags[0]


def test_longer_completions_and_tails_slow_a_plan_down(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    growing = tmp_path / "growing.json"
    msgspec.structs.replace(read_rates(tmp_path / "rates.json"), context=1e-5).write(growing)
    words = [files[0], "--rates", str(growing)]
    plain, longer, tailed = (
        rate_of(run([*words, *more], capsys)[1]) for more in ([], ["--length-factor", "4"], ["--tail", "400"])
    )
    assert longer < 0.8 * plain  # 75 tokens of context more for each of 8 sequences: 6 ms on 10
    assert tailed < 0.8 * plain
