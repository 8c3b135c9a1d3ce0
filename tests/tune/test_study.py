"""A study tries real settings, goes on where it stopped, and keeps its limits; each trial is a run of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.report.conftest import record

from headway.config import RunConfig, load_recipe
from headway.errors import ConfigError, RunFailed
from headway.tune import Limits, Outcome, Space, Study, draw, measure
from headway.tune import study as study_module
from headway.tune.outcome import outcome
from headway.tune.space import with_values


def outcome_of(config: RunConfig, seconds: float) -> Outcome:
    """A made-up machine: lag costs nothing, sequences at once are worth their number."""
    lag = config.staleness.max_lag
    if config.push.interval == 2 and lag == 1:
        raise RunFailed("made up")
    return Outcome(10.0 * lag + config.generator.max_running, 1.0, lag / 2, 0.1, 0.2, 1.0 / (1 + lag), 9)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(study_module, "measure", outcome_of)
    return []


def test_the_recipe_is_tried_first_and_the_best_is_found(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, made_up: list[str]
) -> None:
    config = tiny_config(staleness={"max_lag": 2})
    study = Study.open(config, Limits(max_lag=8), tmp_path / "s")
    study.run(30, made_up.append)
    trials = study.trials()
    assert trials[0].values == {
        "staleness.max_lag": 2, "generator.max_running": 64, "push.interval": 1, "generator.replicas": 1,
    }  # fmt: skip
    best = study.best()
    assert best is not None
    assert best.values["staleness.max_lag"] == 8
    assert best.values["generator.max_running"] == 128
    assert all("made up" in trial.fault for trial in trials if trial.outcome is None)
    draw(trials, best, "made up", tmp_path / "tune.html")
    assert "trained tokens per second" in (tmp_path / "tune.html").read_text()


def test_limits_are_kept_and_reward_may_decide(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, made_up: list[str]
) -> None:
    config = tiny_config(staleness={"max_lag": 8})
    limited = Study.open(config, Limits(lag=1.0), tmp_path / "lag")
    limited.run(25, made_up.append)
    best = limited.best()
    assert best is not None
    assert best.values["staleness.max_lag"] <= 2
    assert any("a limit is not kept" in line for line in made_up)
    by_reward = Study.open(config, Limits(), tmp_path / "reward", by="reward")
    by_reward.run(25, made_up.append)
    best = by_reward.best()
    assert best is not None
    assert best.values["staleness.max_lag"] == 1


def test_a_study_goes_on_where_it_stopped_and_takes_no_other_recipe(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, made_up: list[str]
) -> None:
    config = tiny_config()
    first = Study.open(config, Limits(), tmp_path)
    first.run(3, made_up.append)
    first._study.ask()  # its process is killed in the middle of a trial
    again = Study.open(config, Limits(), tmp_path)
    assert [trial.values for trial in again.trials()] == [trial.values for trial in first.trials()]
    again.run(5, made_up.append)
    assert len(again.trials()) == 5
    with pytest.raises(ConfigError, match="a study of another recipe"):
        Study.open(tiny_config(learner={"lr": 0.5}), Limits(), tmp_path)
    with pytest.raises(ConfigError, match="a study of another recipe"):
        Study.open(config, Limits(lag=1.0), tmp_path)
    with pytest.raises(ConfigError, match="or --seconds"):
        Study.open(config, Limits(), tmp_path, seconds=7.0)


def test_a_setting_that_was_to_be_tried_first_is_tried_after_a_kill(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, made_up: list[str]
) -> None:
    config = tiny_config()
    killed = Study.open(config, Limits(), tmp_path)
    killed.suggest({"staleness.max_lag": 8})
    killed._study.ask()  # the recipe's own; its process is killed
    again = Study.open(config, Limits(), tmp_path)
    again.run(2, made_up.append)
    tried = [trial.values["staleness.max_lag"] for trial in again.trials()]
    assert sorted(tried) == sorted([config.staleness.max_lag, 8])


def test_negative_rewards_have_a_best(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, made_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_debt(config: RunConfig, seconds: float) -> Outcome:
        return msgspec.structs.replace(outcome_of(config, seconds), reward=-float(config.staleness.max_lag))

    monkeypatch.setattr(study_module, "measure", in_debt)
    study = Study.open(tiny_config(), Limits(), tmp_path, by="reward")
    study.run(8, made_up.append)
    best = study.best()
    assert best is not None
    assert best.values["staleness.max_lag"] == min(t.values["staleness.max_lag"] for t in study.trials())


@pytest.mark.parametrize("name", ["q?x=1", "p%41"])
def test_a_folder_that_sqlite_would_take_for_something_else_is_refused(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match="has no"):
        Study.open(tiny_config(), Limits(), tmp_path / name)


def test_a_damaged_study_is_refused(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="cannot be read"):
        Study.open(tiny_config(), Limits(), tmp_path)


def test_one_trial_at_a_time_tries_other_settings(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, made_up: list[str]
) -> None:
    for number in range(1, 7):
        Study.open(tiny_config(), Limits(), tmp_path).run(number, made_up.append)
    settings = {
        tuple(trial.values.items()) for trial in Study.open(tiny_config(), Limits(), tmp_path).trials()
    }
    assert len(settings) >= 5
    assert len(made_up) == 6, "one that is not run again is said too"


def test_a_folder_of_something_else_is_refused(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no study and is not empty"):
        Study.open(tiny_config(), Limits(), tmp_path)


def test_what_a_plan_suggests_comes_next_and_once(
    tiny_config: Callable[..., RunConfig], tmp_path: Path, made_up: list[str]
) -> None:
    suggested = {"staleness.max_lag": 7, "generator.max_running": 30}
    Study.open(tiny_config(), Limits(), tmp_path).suggest(suggested)
    study = Study.open(tiny_config(), Limits(), tmp_path)
    study.suggest(suggested)
    study.run(2, made_up.append)
    assert study.trials()[1].values["staleness.max_lag"] == 8
    assert study.trials()[1].values["generator.max_running"] == 32


def test_a_setting_that_contradicts_the_recipe_is_refused(tiny_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match=r"push\.interval"):
        with_values(tiny_config(), {"staleness.max_lag": 0, "push.interval": 2})
    config = tiny_config(generator={"engine": "vllm", "replicas": 2, "gpus": [0, 1]})
    assert with_values(config, {"generator.replicas": 1}).generator.gpus == []
    assert Space.of(config, Limits(replicas=4)).choices["generator.replicas"] == [1, 2, 3, 4]


def test_an_outcome_is_of_the_rows_after_the_warm_up() -> None:
    rows = [record(step, lag_mean=float(step)) for step in range(1, 11)]  # two seconds each, 9 tokens
    found = outcome(rows, since_s=9.0)
    assert found.updates == 5
    assert found.tokens_per_s == pytest.approx(9 / 2)
    assert found.lag_mean == pytest.approx((6 + 7 + 8 + 9 + 10) / 5)
    assert found.learner_idle == pytest.approx(0.5)
    assert found.generator_idle == pytest.approx(0.05)
    with pytest.raises(RunFailed, match="2 updates after the warm-up"):
        outcome(rows, since_s=17.0)


def test_a_trial_is_a_real_run(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = tiny_config(steps=100_000, run_dir=str(tmp_path / "trial"))
    found = measure(config, 1.5)
    assert found.updates > 3
    assert found.tokens_per_s > 0.0
    assert (tmp_path / "trial" / "summary.json").exists()


def test_the_command_leaves_a_recipe_and_a_picture(
    tiny_model: Path, tmp_path: Path, made_up: list[str], capsys: Any
) -> None:
    from headway.cli.app import main

    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'steps = 9\n[model]\npath = "{tiny_model}"\n[env]\nname = "sort"\n[staleness]\nmax_lag = 2\n'
    )
    words = ["tune", str(recipe), "--out", str(tmp_path / "out"), "--trials", "6", "--staleness.slots", "0"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    said = capsys.readouterr().out
    assert "best: trial" in said
    assert load_recipe(tmp_path / "out" / "recipe.toml", {}).staleness.max_lag >= 2
    assert (tmp_path / "out" / "tune.html").stat().st_size > 1000
