"""Runs without sleeps: a tiny model that really decodes and trains on this machine, both sides on a core of their own.

What they take is calibrated once, on the first case with another seed, and holds for all of them: the others change how
far apart the sides may be, and how many sequences a generator holds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headway.cli.calibrating import rates_of
from headway.config import RunConfig
from headway.planner import Rates
from headway.serial.calibrate import Calibration
from headway.tune.looped import looped
from headway.tune.outcome import rows_of
from headway_bench.shaped.play import Measured, measured

PARTS_S, LOOP_S = 20.0, 40.0
CALIBRATED_SEED = 1000
COMMON: dict[str, Any] = {
    "save": False,
    "model": {"path": "builtin:sort3"},
    "env": {"name": "sort", "args": {"digits": 3}},
    "batch": {"prompts": 4, "samples": 8, "tokens_per_row": 8192},
    "sampling": {"max_new_tokens": 64, "ignore_eos": True},
    "algo": {"filter_zero_variance": False},
    "learner": {"lr": 1e-5, "threads": 1},
    "generator": {"threads": 1, "max_running": 64},
    "staleness": {"max_lag": 2},
    "checkpoint": {"interval": 0},
}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "plain, max_lag 1": {"staleness": {"max_lag": 1}},
    "plain, synchronous": {"staleness": {"max_lag": 0}},
    "plain, few sequences": {"generator": {"max_running": 16}},
}


def config_of(name: str, steps: int, seed: int) -> RunConfig:
    """The recipe of a case."""
    sections = dict(COMMON)
    for section, values in CASES[name].items():
        sections[section] = {**sections[section], **values}
    return RunConfig.model_validate({**sections, "steps": steps, "seed": seed})


def calibrated(note: Callable[[str], None]) -> Rates:
    """What `headway calibrate` finds of the first case."""
    torch.set_num_threads(1)
    config = config_of("plain", 1000, CALIBRATED_SEED)
    return looped(rates_of(config, Calibration(config, PARTS_S, note).run()), config, LOOP_S, note)


def play(config: RunConfig, warmup: int) -> Measured:
    """Run it to its end."""
    with tempfile.TemporaryDirectory(prefix="plain-") as folder:
        run_dir = str(Path(folder) / "run")
        return measured(rows_of(config.model_copy(update={"run_dir": run_dir}), float("inf")), warmup)
