"""A run with one idle side for some seconds, and the rates of the other."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.config import RunConfig
from headway.config.loading import validate
from headway.tune.outcome import WARM_UP, after_warm_up, endless, rows_of, share_of
from headway.types import StepRecord
from headway_bench.alone.child import GENERATE, LEARN
from headway_bench.alone.recorded import Recorded


@dataclass(frozen=True)
class Alone:
    """What one side did after the warm-up.

    Attributes:
        tokens_per_s: received of the generators, or trained; idle, push: shares of that side's time, waiting for the
            other one and on pushes. tokens: trained by an update.
    """

    tokens_per_s: float
    idle: float
    push: float
    tokens: float


def recipe_for(side: str, config: RunConfig, run_dir: Path) -> RunConfig:
    """The recipe as `endless` says, its weights frozen.

    Groups without a gradient are trained too: which groups come is no property of the speed that is measured.
    """
    data = endless(config, run_dir)
    data["learner"].update(lr=0.0, warmup_steps=0)
    data["algo"]["filter_zero_variance"] = False
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
        rows = rows_of(recipe_for(side, config, folder / "run"), seconds, program)
    return measured(side, rows, seconds * WARM_UP)


def measured(side: str, rows: Sequence[StepRecord], since_s: float) -> Alone:
    """Of the rows after `since_s` seconds.

    Raises:
        RunFailed: they are too few.
    """
    counted = after_warm_up(rows, since_s)
    first, last, parts = counted[0], counted[-1], counted[1:]
    what = "received" if side == GENERATE else "trained"
    splits = [row.generator if side == GENERATE else row.learner for row in parts]
    return Alone(
        tokens_per_s=(last.tokens[what] - first.tokens[what]) / (last.elapsed_s - first.elapsed_s),
        idle=share_of(splits, "idle"),
        push=share_of(splits, "push"),
        tokens=sum(row.num_tokens for row in parts) / len(parts),
    )
