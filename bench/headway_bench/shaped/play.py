"""One shaped run: a recipe of the tiny model, its shape, and what the run's own records say of it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headway
from headway.config import RunConfig
from headway.errors import HeadwayError
from headway.tune.outcome import share_of
from headway.types import StepRecord
from headway_bench.shaped.shape import Shape, ShapeFile

PROMPT_TOKENS = 5.0  # of the sort task's three digits


@dataclass(frozen=True)
class Measured:
    """What a run did.

    Attributes:
        tokens_per_s: trained; lag_mean: of a trained token.
        learner_idle, generator_idle: shares of their time.
        learner_other_s, learner_push_s: seconds of an update that the learner spends on messages and records, and on
            its push.
    """

    tokens_per_s: float
    lag_mean: float
    learner_idle: float
    generator_idle: float
    learner_other_s: float = 0.0
    learner_push_s: float = 0.0


def recipe(shape: Shape, **sections: dict[str, Any] | int) -> dict[str, Any]:
    """A recipe of the tiny model with room for the shape's completions."""
    base: dict[str, Any] = {
        "save": False,
        "model": {"path": "builtin:sort3"},
        "env": {"name": "sort", "args": {"digits": 3}},
        "batch": {"prompts": 4, "samples": 4, "tokens_per_row": 8192},
        "sampling": {"max_new_tokens": shape.longest, "ignore_eos": True},
        "algo": {"filter_zero_variance": False},
        "learner": {"lr": 1e-5, "threads": 1},
        "generator": {"threads": 1, "max_running": 64},
        "stream": {"rollout_deadline_s": 600.0, "heartbeat_s": 0.25},
        "checkpoint": {"interval": 0},
    }
    for name, value in sections.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return base


def play(shape: Shape, sections: dict[str, Any], seed: int = 0, warmup: int = 1) -> Measured:
    """Run to the end in a folder that is removed afterwards.

    Args:
        seed: of the lengths. warmup: first updates that are left out, at least the one in which processes start.

    Raises:
        HeadwayError: it did not finish.
    """
    folder = Path(tempfile.mkdtemp(prefix="shaped-"))
    try:
        file = folder / "shape.json"
        ShapeFile(shape, seed).write(file)
        program = [sys.executable, "-P", "-m", "headway_bench.shaped.child", str(file)]
        with headway.Engine(
            None, program=program, run_dir=str(folder / "run"), seed=seed, **sections
        ) as engine:
            records = list(engine)
            status = engine.wait()
        if status is None or status.status != "finished":
            cause = status.cause if status is not None else "it never began"
            raise HeadwayError(f"a shaped run ended early: {cause}")
        return measured(records, warmup)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measured(records: Sequence[StepRecord], warmup: int) -> Measured:
    """Means and shares of a run's rows after the first `warmup`."""
    counted = records[warmup:]
    lags: Counter[int] = Counter()
    for record in counted:
        lags.update(dict(enumerate(record.lag_histogram)))
    tokens = lags.total()
    return Measured(
        tokens / max(1e-9, counted[-1].elapsed_s - records[warmup - 1].elapsed_s),
        sum(lag * count for lag, count in lags.items()) / max(1, tokens),
        share_of([record.learner for record in counted], "idle"),
        share_of([record.generator for record in counted], "idle"),
        sum(record.learner.other for record in counted) / len(counted),
        sum(record.learner.push for record in counted) / len(counted),
    )


def config_of(sections: dict[str, Any]) -> RunConfig:
    """The recipe as the engine reads it."""
    return RunConfig.model_validate(sections)
