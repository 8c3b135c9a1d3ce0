"""The words of a command line: a recipe and overrides in any order."""

from pathlib import Path

import pytest

from headway.cli.errors import block
from headway.cli.running import recipe, split_words
from headway.errors import ConfigError, RunFailed

RECIPE = Path("a.toml")


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["a.toml"], []),
        (["a.toml", "--learner.lr", "1e-6"], ["--learner.lr", "1e-6"]),
        (["--learner.lr", "1e-6", "a.toml"], ["--learner.lr", "1e-6"]),
        (["--learner.lr=1e-6", "a.toml", "--steps", "3"], ["--learner.lr=1e-6", "--steps", "3"]),
        (["--env.args.low", "-3", "a.toml"], ["--env.args.low", "-3"]),
        (["a.toml", "b.toml"], ["b.toml"]),
    ],
)
def test_the_recipe_is_the_word_that_belongs_to_no_override(words: list[str], overrides: list[str]) -> None:
    assert split_words(words) == (RECIPE, overrides)


def test_no_recipe_is_said() -> None:
    with pytest.raises(ConfigError, match="no recipe was given"):
        recipe(["--learner.lr", "1e-6"])


def test_errors_are_one_block() -> None:
    faults = [("learner.lr", "too large"), ("", "no recipe at x.toml")]
    assert block(ConfigError(faults)).splitlines() == [
        "headway: the recipe is wrong in 2 places:", "  learner.lr: too large", "  no recipe at x.toml",
    ]  # fmt: skip
    assert block(RunFailed("learner died\nlast line")) == "headway: RunFailed: learner died\n  last line"
