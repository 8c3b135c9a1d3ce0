"""The embedding API: what is exported, how a recipe and sections combine, and use from a plain script."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import headway
from headway.config.live_keys import changed
from headway.engine import _resolve
from headway.errors import ConfigError

FAKE = Path(__file__).parents[1] / "launch" / "fake_headway.py"

SCRIPT = f"""
import sys
import headway

with headway.Engine(
    "recipe.toml", program=(sys.executable, {str(FAKE)!r}), learner={{"lr": 1e-5}}, steps=4
) as engine:
    for step in engine:
        print(step.step, engine.config.learner.lr)
print(engine.status.status, engine.run_dir.parent.name)
"""


def test_the_public_names() -> None:
    assert dir(headway) == sorted(
        ["ConfigError", "Engine", "HeadwayError", "LearnerStatus", "RunConfig", "RunFailed", "StepRecord",
         "__version__", "load_recipe"]
    )  # fmt: skip
    for name in headway.__all__:
        assert getattr(headway, name) is not None
    with pytest.raises(AttributeError, match="it offers ConfigError, Engine"):
        _ = headway.Engin


def test_sections_win_over_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'steps = 9\n[model]\npath = "m"\n[env]\nname = "sort"\n[learner]\nlr = 1.0\nbeta1 = 0.5\n'
    )
    config = _resolve(path, {"learner": {"lr": 1e-6}, "steps": 3})
    assert (config.learner.lr, config.learner.beta1, config.steps) == (1e-6, 0.5, 3)
    again = _resolve(config, {"sampling": {"stop_strings": ["x"]}, "env": {"args": {"low": 2}}})
    assert (again.learner.lr, again.sampling.stop_strings, again.env.args) == (1e-6, ("x",), {"low": 2})
    assert _resolve(config, {}) is config
    with pytest.raises(ConfigError, match=r"did you mean learner\.lr"):
        _resolve(path, {"learner": {"lrr": 1e-6}})


def test_a_live_change_obeys_the_rules_of_a_recipe() -> None:
    config = _resolve(None, {"model": {"path": "m"}, "env": {"name": "sort"}, "push": {"interval": 2}})
    assert changed(config, "staleness.max_lag", 4).staleness.max_lag == 4
    with pytest.raises(ConfigError, match=r"push\.interval"):
        changed(config, "staleness.max_lag", 0)


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('steps = 9\n[model]\npath = "none"\n[env]\nname = "none"\n')
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1 1e-05", "2 1e-05", "3 1e-05", "4 1e-05", "finished runs"]


def test_no_keyword_of_the_constructor_hides_a_section_of_the_recipe() -> None:
    keywords = inspect.signature(headway.Engine.__init__).parameters.keys()
    assert not keywords & headway.RunConfig.model_fields.keys()
