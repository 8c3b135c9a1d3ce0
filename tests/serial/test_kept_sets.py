"""Top-p for training: over kept sets the ratio of a frozen policy is 1; without them it is refused, or off by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config import RunConfig, load_recipe
from headway.errors import ConfigError
from headway.serial import SerialRun
from headway.serial.selfcheck import SelfCheck
from headway.types import StepRecord

FROZEN: dict[str, Any] = {"lr": 1e-30}


def played(config: RunConfig) -> list[StepRecord]:
    run = SerialRun(config)
    try:
        return list(run.steps())
    finally:
        run.close()


@pytest.mark.parametrize("share", ["none", "tree"])
def test_the_ratio_of_a_frozen_policy_is_one(tiny_config: Callable[..., RunConfig], share: str) -> None:
    config = tiny_config(
        steps=6, learner=FROZEN, sampling={"top_p": 0.8, "kept_sets": "carry"}, batch={"share_prefix": share}
    )
    records = played(config)
    assert len(records) == 6
    for record in records:
        assert record.ratio_mean == pytest.approx(1.0, abs=1e-4)  # 0.01 is asked for
        assert record.ratio_max == pytest.approx(1.0, abs=1e-3)
    assert records[0].start_check["max_log_ratio"] < 1e-4


def test_a_run_that_learns_with_top_p_keeps_its_ratios_near_one(
    tiny_config: Callable[..., RunConfig],
) -> None:
    sampling = {"top_p": 0.8, "top_k": 6, "kept_sets": "carry"}
    records = played(tiny_config(steps=4, sampling=sampling, staleness={"max_lag": 2, "window": 3}))
    assert not any(record.skipped for record in records)
    assert all(record.ess > 0.75 for record in records)
    fresh = [record for record in records if record.lag_max == 0]
    assert len(fresh) >= 2
    assert all(record.ratio_max == pytest.approx(1.0, abs=1e-4) for record in fresh)


def test_without_kept_sets_it_is_refused_and_by_name_it_is_off_and_says_so(
    tiny_config: Callable[..., RunConfig], tiny_model: Path
) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.top_p: 0\.8 truncates.*sampling\.kept_sets = 'carry'"):
        load_recipe(None, {"model.path": str(tiny_model), "env.name": "sort", "sampling.top_p": 0.8})
    said: list[str] = []
    config = tiny_config(steps=2, learner=FROZEN, sampling={"top_p": 0.8, "kept_sets": "ignore"})
    run = SerialRun(config, said.append)
    try:
        records = list(run.steps())
    finally:
        run.close()
    assert all(record.ratio_mean < 0.99 for record in records)  # the kept mass, 0.8 and a little more
    assert any("every ratio off by the kept mass" in line for line in said)


def test_what_nothing_could_come_of_is_refused(
    tiny_config: Callable[..., RunConfig], tiny_model: Path
) -> None:
    ignored = tiny_config(sampling={"top_p": 0.8, "kept_sets": "ignore"})
    with pytest.raises(ConfigError, match=r"'ignore': both sides score over different ids on purpose"):
        SelfCheck(ignored)
    given = {
        "model.path": str(tiny_model),
        "env.name": "sort",
        "sampling.kept_sets": "carry",
        "sampling.top_k": 1,
    }
    with pytest.raises(ConfigError, match="1 leaves each token one choice"):
        load_recipe(None, given)
