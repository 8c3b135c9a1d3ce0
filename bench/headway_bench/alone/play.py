"""A run with one idle side for some seconds, and the rates of the other."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.config import RunConfig
from headway.config.loading import validate
from headway.engine import Engine
from headway.errors import RunFailed
from headway.types import StepRecord, TimeSplit
from headway_bench.alone.child import GENERATE, LEARN
from headway_bench.alone.recorded import Recorded

WARM_UP = 1.0 / 3.0  # of the seconds; the pipeline fills and caches warm in it
LEAST_ROWS = 4
ENDLESS = 10**9


@dataclass(frozen=True)
class Alone:
    """What one side did after the warm-up.

    Attributes:
        tokens_per_s: received of the generators, or trained; idle, push: shares of that side's time, waiting for the
            other one and on pushes. tokens, forwarded: of an update, trained and in all.
    """

    tokens_per_s: float
    idle: float
    push: float
    tokens: float
    forwarded: float


def recipe_for(side: str, config: RunConfig, run_dir: Path) -> RunConfig:
    """The recipe without an end and without files that nobody wants, its weights frozen.

    Groups without a gradient are trained too: which groups come is no property of the speed that is measured.
    """
    data = config.model_dump()
    data.update(steps=ENDLESS, run_dir=str(run_dir), save=False)
    data["learner"].update(lr=0.0, warmup_steps=0)
    data["algo"]["filter_zero_variance"] = False
    data["checkpoint"]["interval"] = 0
    data["telemetry"]["sinks"] = []
    if side == LEARN:
        data["generator"].update(engine="torch", vllm={}, replicas=1, gpus=[])
    return validate(data)


def play(side: str, config: RunConfig, seconds: float, recorded: Recorded | None = None) -> Alone:
    """Run it in a folder that is removed afterwards.

    Raises:
        RunFailed: it failed, or made too few updates in that time to say anything.
    """
    with tempfile.TemporaryDirectory(prefix="alone-") as name:
        folder, file = Path(name), "-"
        if recorded is not None:
            file = str(folder / "recorded")
            recorded.write(Path(file))
        program = [sys.executable, "-P", "-m", "headway_bench.alone.child", side, file]
        rows: list[StepRecord] = []
        with Engine(recipe_for(side, config, folder / "run"), program=program) as engine:
            for row in engine:
                rows.append(row)
                if row.elapsed_s >= seconds:
                    break
    return measured(side, rows, seconds * WARM_UP)


def measured(side: str, rows: Sequence[StepRecord], since_s: float) -> Alone:
    """Of the rows after `since_s` seconds.

    Raises:
        RunFailed: they are too few.
    """
    counted = [row for row in rows if row.elapsed_s >= since_s]
    if len(counted) < LEAST_ROWS:
        raise RunFailed(
            f"{len(counted)} updates after the warm-up, at least {LEAST_ROWS} say something; give more --seconds"
        )
    first, last, parts = counted[0], counted[-1], counted[1:]
    what = "received" if side == GENERATE else "trained"
    splits = [row.generator if side == GENERATE else row.learner for row in parts]
    return Alone(
        tokens_per_s=(last.tokens[what] - first.tokens[what]) / (last.elapsed_s - first.elapsed_s),
        idle=_share(splits, "idle"),
        push=_share(splits, "push"),
        tokens=sum(row.num_tokens for row in parts) / len(parts),
        forwarded=sum(row.num_forwarded for row in parts) / len(parts),
    )


def _share(splits: Sequence[TimeSplit], name: str) -> float:
    return sum(getattr(split, name) for split in splits) / max(1e-9, sum(split.total for split in splits))
