"""The saved recipe is the recipe."""

import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import load_recipe, save, to_toml
from headway.config.loading import validate

BASE: dict[str, Any] = {"model.path": "builtin:sort", "env.name": "sort"}
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SCALARS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans(), TEXT,
    st.dates(), st.datetimes(),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXT, below, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(TEXT, VALUES, max_size=4))
def test_any_arguments_load_back_equal(
    arguments: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    import tomllib

    config = load_recipe(None, {**BASE, "env.args": arguments})
    assert validate(tomllib.loads(to_toml(config))) == config


def test_every_section_loads_back_equal(tmp_path: Path) -> None:
    config = load_recipe(
        None,
        {
            **BASE,
            "sampling": {"stop_strings": ["\n\n", 'a"b\\', "\x1b[31m", "é"], "temperature": 0.7},
            "learner": {"lr": 3.3e-7, "eps": 1e-300},
            "algo": {"objective": "grpo", "clip_low": 0.2},
            "env.args": {"day": datetime.date(2024, 1, 2)},
        },
    )
    path = tmp_path / "config.toml"
    save(config, path)
    assert load_recipe(path) == config
    assert [other.name for other in tmp_path.iterdir()] == ["config.toml"]


def test_what_toml_cannot_hold_is_said() -> None:
    with pytest.raises(TypeError, match="TOML has no object"):
        to_toml(load_recipe(None, {**BASE, "env.args": {"x": object()}}))
