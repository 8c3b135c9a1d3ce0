"""Fixtures that several folders use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config import RunConfig


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sort models' architecture and tokenizer, random weights."""
    from headway.model.builtin import sort_tokenizer, tiny_sort_model

    folder = tmp_path_factory.mktemp("tiny")
    tiny_sort_model(seed=3).save_pretrained(str(folder))
    sort_tokenizer().save_pretrained(str(folder))
    return folder


@pytest.fixture
def tiny_config(tiny_model: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes the recipe of a quick run of the tiny model; keyword arguments replace keys of its sections.

    The reward varies from the start, which a sorter's would not.
    """

    def make(**changes: Any) -> RunConfig:
        sections: dict[str, Any] = {
            "steps": 4,
            "run_dir": str(tmp_path / "run"),
            "model": {"path": str(tiny_model)},
            "env": {"name": "sort", "args": {"digits": 4, "seed": 5, "reward": "sum7"}},
            "batch": {"prompts": 2, "samples": 4},
            "sampling": {"max_new_tokens": 6},
            "learner": {"lr": 1e-3, "threads": 1},
            "generator": {"threads": 1, "max_running": 64},
            "checkpoint": {"interval": 0},
            "stream": {"heartbeat_s": 0.5, "startup_deadline_s": 100.0, "rollout_deadline_s": 60.0},
        }
        for name, value in changes.items():
            sections[name] = {**sections.get(name, {}), **value} if isinstance(value, dict) else value
        return RunConfig.model_validate(sections)

    return make
