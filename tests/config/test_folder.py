"""The folder of a run: unique, complete, found again."""

from pathlib import Path
from typing import Any

import pytest

from headway.config import create_run, load_recipe, open_run
from headway.errors import ConfigError

BASE: dict[str, Any] = {"model.path": "builtin:sort", "env.name": "sort"}


def test_two_runs_in_the_same_second_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headway.config.folder.time.strftime", lambda _format: "20240102-030405")
    config = load_recipe(None, {**BASE, "name": "twice"})
    first, second = create_run(config), create_run(config)
    assert first.path.name == "twice-20240102-030405"
    assert second.path.name == "twice-20240102-030405-1"
    assert first.run_id != second.run_id


def test_a_run_is_found_again_with_its_recipe(tmp_path: Path) -> None:
    config = load_recipe(None, {**BASE, "run_dir": str(tmp_path / "here"), "learner.lr": 1e-5})
    created = create_run(config)
    found, loaded = open_run(created.path)
    assert (found, loaded) == (created, config)
    assert found.logs.is_dir()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    config = load_recipe(None, {**BASE, "run_dir": str(tmp_path)})
    create_run(config)
    with pytest.raises(ConfigError, match="is not empty"):
        create_run(config)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run"):
        open_run(tmp_path)
