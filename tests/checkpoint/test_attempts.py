"""Epochs count attempts, and the lineage says which of their weights the present ones descend from."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.checkpoint import Attempt, Attempts
from headway.checkpoint.attempts import lineage
from headway.config import RunConfig, RunFolder, load_recipe
from headway.errors import CheckpointError
from headway.types import PolicyVersion as V


def test_attempts_are_numbered_and_keep_their_recipe(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"model": {"path": "none"}, "env": {"name": "sort"}})
    attempts = Attempts(RunFolder(tmp_path, "run"))
    assert attempts.last() == Attempt(0)
    first = attempts.begin(config)
    assert (first.epoch, first.version, first.lineage) == (0, V(0, 0), [])
    second = attempts.begin(config.model_copy(update={"steps": 9}), "0.5", V(0, 5), ["rng"])
    assert (second.epoch, second.version, second.lineage) == (1, V(1, 5), [V(0, 5)])
    third = attempts.begin(config)
    assert (third.version, third.lineage) == (V(2, 0), [V(0, 0)])
    assert attempts.all() == [first, second, third]
    assert load_recipe(attempts.recipe(1)).steps == 9
    (tmp_path / "attempts" / "1.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"1\.json cannot be read"):
        attempts.last()


def attempt(epoch: int, start: V | None) -> Attempt:
    return Attempt(epoch, start=start)


def test_a_lineage_follows_what_each_attempt_started_from() -> None:
    chain = [attempt(0, None), attempt(1, V(0, 5)), attempt(2, V(1, 8))]
    assert lineage(chain, V(2, 20)) == [V(0, 5), V(1, 8), V(2, 20)]
    assert lineage(chain, V(1, 7)) == [V(0, 5), V(1, 7)]
    assert lineage(chain, V(0, 3)) == [V(0, 3)]


def test_an_attempt_that_died_early_had_the_weights_it_started_from() -> None:
    """Epochs 1 and 2 both started from 0.5: what 1 sampled at its step 5 is what 2 would sample."""
    died = [attempt(0, None), attempt(1, V(0, 5)), attempt(2, V(0, 5))]
    assert lineage(died, V(0, 5)) == [V(0, 5), V(1, 5), V(2, 5)]
    assert lineage(died, V(2, 9)) == [V(0, 5), V(1, 5), V(2, 9)]
    # one that started from weights which are rolled back has none of the lineage
    assert lineage([attempt(0, None), attempt(1, V(0, 5))], V(0, 4)) == [V(0, 4)]
