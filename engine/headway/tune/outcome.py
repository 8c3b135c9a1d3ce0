"""One short real run, and what its rows say."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.config import RunConfig
from headway.engine import HEADWAY, Engine
from headway.errors import RunFailed
from headway.types import StepRecord, TimeSplit

ENDLESS = 10**9  # updates
WARM_UP = 1.0 / 3.0  # of a trial's time; the pipeline fills and caches warm in it
LEAST_ROWS = 4


class Outcome(msgspec.Struct, frozen=True):
    """What a run did after its warm-up.

    Attributes:
        tokens_per_s, samples_per_s: trained. lag_mean: of a trained token, in optimizer steps.
        learner_idle, generator_idle: shares of their time. reward: mean of the rows. updates: their number.
    """

    tokens_per_s: float
    samples_per_s: float
    lag_mean: float
    learner_idle: float
    generator_idle: float
    reward: float
    updates: int


def endless(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """The sections of a recipe whose run is ended by whoever measures it, without files and sinks that nobody wants."""
    data = config.model_dump()
    data.update(steps=ENDLESS, run_dir=str(run_dir), save=False)
    data["checkpoint"]["interval"] = 0
    data["telemetry"]["sinks"] = []
    return data


def measure(config: RunConfig, seconds: float) -> Outcome:
    """Run a recipe for so many seconds after its first ticket.

    Raises:
        RunFailed: the run failed, or made too few updates in that time to say anything.
    """
    return outcome(rows_of(config, seconds), seconds * WARM_UP)


def rows_of(config: RunConfig, seconds: float, program: Sequence[str] = HEADWAY) -> list[StepRecord]:
    """Run a recipe until so many seconds after its first ticket, or its end; its rows.

    Args:
        program: as headway.Engine's.

    Raises:
        RunFailed: the run failed.
    """
    rows: list[StepRecord] = []
    with Engine(config, program=program) as engine:
        for row in engine:
            rows.append(row)
            if row.elapsed_s >= seconds:
                break
    return rows


def after_warm_up(rows: Sequence[StepRecord], since_s: float) -> list[StepRecord]:
    """The rows after `since_s` seconds.

    Raises:
        RunFailed: they are too few.
    """
    counted = [row for row in rows if row.elapsed_s >= since_s]
    if len(counted) < LEAST_ROWS:
        raise RunFailed(
            f"{len(counted)} updates after the warm-up, at least {LEAST_ROWS} say something; give more --seconds"
        )
    return counted


def share_of(splits: Sequence[TimeSplit], part: str) -> float:
    """A part of their time, "work", "push", "idle" or "other", as a share of all of it."""
    return sum(getattr(split, part) for split in splits) / max(1e-9, sum(split.total for split in splits))


def outcome(rows: Sequence[StepRecord], since_s: float) -> Outcome:
    """Of the rows after `since_s` seconds.

    Raises:
        RunFailed: they are too few.
    """
    counted = after_warm_up(rows, since_s)
    first, last = counted[0], counted[-1]
    seconds = last.elapsed_s - first.elapsed_s
    parts = counted[1:]
    return Outcome(
        tokens_per_s=(last.tokens["trained"] - first.tokens["trained"]) / seconds,
        samples_per_s=(last.trajectories["trained"] - first.trajectories["trained"]) / seconds,
        lag_mean=statistics.fmean(row.lag_mean for row in parts),
        learner_idle=share_of([row.learner for row in parts], "idle"),
        generator_idle=share_of([row.generator for row in parts], "idle"),
        reward=statistics.fmean(row.reward for row in parts),
        updates=len(parts),
    )
