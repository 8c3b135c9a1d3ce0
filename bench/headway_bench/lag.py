"""`headway bench lag`: what staleness costs in reward, by objective, at the same number of trained samples.

Every batch has exactly the lag that is asked for: a serial run generates all that may be outstanding to its end before
each update, and takes groups in the order of their tickets, so that a group is trained S updates after the weights that
sampled all of it. (The first S updates have less, which is all there is.) Lag is thus the only thing that differs
between two runs of a seed: no scheduling, no lengths, no machine.

A cell's reward is that of the weights around update --steps: the mean over the samples drawn by the WINDOW versions
before it, whenever they were trained. Runs go on for twice the largest lag, so that the end of a run, where no new
prompts are begun, is not in it.

"uncorrected" is GRPO whose old log-probs are the learner's own at the update, as trainers do that do not record the
generator's: every ratio is 1, whatever the lag.

Finished cells are appended to --cells at once; a bench that was interrupted goes on with what is missing. Cells of
another commit or recipe are measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.buffer import Group
from headway.config import RunConfig
from headway.config.schema import AlgoConfig
from headway.errors import DeadlineExceeded, RunFailed
from headway.serial import SerialRun
from headway.trainer import Trainer, prepare, score_row
from headway_bench.harness import exit_status, make_row, quantiles, wide_console, write_rows
from headway_bench.lag_cells import (
    AIMS,
    DEFAULT,
    WINDOW,
    Cell,
    Key,
    draw,
    judge,
    read_cells,
    reward_at,
    table,
)
from headway_bench.machine import this_commit

UNCORRECTED = "uncorrected"
OBJECTIVES = (*typing.get_args(AlgoConfig.model_fields["objective"].annotation), UNCORRECTED)


class ExactLag(SerialRun):
    """A serial run that generates everything outstanding before it takes a batch."""

    def _collect(self) -> list[Group]:
        deadline = time.monotonic() + self.config.stream.rollout_deadline_s
        num_quiet = 0
        while True:
            for rollout in self.rollouts:
                self._turn(rollout)
            num_quiet = 0 if self._generating() else num_quiet + 1
            # What ends in a turn may be replaced in the next one: by tickets of the same weights, if it is waited for.
            groups = self.desk.take().groups if num_quiet > 1 else []
            if groups or self.desk.drained:
                return groups
            if time.monotonic() > deadline:
                raise DeadlineExceeded("no complete batch within stream.rollout_deadline_s")

    def _generating(self) -> bool:
        outbox = bool(self.desk.outbox)  # replacements that are granted but not delivered yet
        return outbox or any(rollout.has_work for rollout in self.rollouts)


def config_of(objective: str, lag: int, seed: int, updates: int, run_dir: Path) -> RunConfig:
    """The demo's recipe with a batch of four groups, in order, `lag` updates behind."""
    algo: dict[str, Any] = {"objective": "grpo" if objective == UNCORRECTED else objective}
    return RunConfig.model_validate({
        "seed": seed,
        "steps": updates,
        "run_dir": str(run_dir),
        "model": {"path": "builtin:sort5"},
        "env": {"name": "sort", "args": {"digits": 5, "seed": seed}},
        "batch": {"prompts": 4, "samples": 16},
        "sampling": {"max_new_tokens": 8},
        "algo": algo,
        "learner": {"lr": 1e-4, "warmup_steps": 10},
        "staleness": {"max_lag": lag, "window": 1},
        "generator": {"max_running": 1024},
        "checkpoint": {"interval": 0},
    })  # fmt: skip


def code_of(objective: str) -> str:
    """Commit, and a digest of the recipe that all cells of an objective share."""
    recipe = config_of(objective, 0, 0, 1, Path("run")).model_dump_json()
    return f"{this_commit()} {hashlib.sha256(recipe.encode()).hexdigest()[:8]}"


def measure(key: Key) -> Cell:
    """Play one run."""
    objective, lag = key.objective, key.lag
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(objective, lag, key.seed, key.updates, Path(folder) / "run")
        run = ExactLag(config)
        if objective == UNCORRECTED:
            run.parts.trainer.step = _uncorrected(run.parts.trainer, config)  # pyright: ignore[reportAttributeAccessIssue]
        began = time.perf_counter()
        records, seconds = [], []
        try:
            for record in run.steps():
                records.append(record)
                seconds.append(time.perf_counter() - began)
        finally:
            run.close()
    rewards = [record.reward for record in records]
    lag_mean = statistics.fmean(record.lag_mean for record in records[lag:])
    if abs(lag_mean - lag) > 1e-9:
        raise RunFailed(f"{objective}, seed {key.seed}: mean lag {lag_mean:.3f} instead of {lag}")
    return Cell(
        **msgspec.structs.asdict(key),
        rewards=rewards,
        seconds=seconds,
        ess=statistics.fmean(record.ess for record in records),
        lag_mean=lag_mean,
        reward=reward_at(rewards, lag, key.steps),
    )


def _uncorrected(trainer: Trainer, config: RunConfig) -> Callable[[Sequence[Group], int], Any]:
    """The trainer's step over groups whose log-probs are the learner's own."""
    step = trainer.step

    def rescored(groups: Sequence[Group], number: int) -> Any:
        batch = prepare(
            groups, config.batch, trainer.recipe, config.sampling.max_new_tokens, consumed=number - 1
        )
        own = [np.zeros(t.num_tokens, np.float32) for t in batch.trajectories]
        for row in batch.rows:
            scores = score_row(trainer.policy, row, config.learner.head_chunk_mib << 20).numpy()
            for sequence, token, score in zip(row.row.sequence, row.row.token, scores, strict=True):
                own[sequence][token] = score
        by_id = {t.trajectory_id: values for t, values in zip(batch.trajectories, own, strict=True)}
        for group in groups:
            group.trajectories[:] = [
                msgspec.structs.replace(t, logprobs=by_id.get(t.trajectory_id, t.logprobs))
                for t in group.trajectories
            ]
        return step(groups, number)

    return rescored


@dataclass(frozen=True)
class Options:
    """The command line."""

    lags: list[int]
    objectives: list[str]
    seeds: list[int]
    steps: int
    cells: Path
    plot: Path | None
    out: Path | None

    @property
    def updates(self) -> int:
        """Of every run."""
        return self.steps + 2 * max(self.lags)

    def keys(self) -> list[Key]:
        """The cells, the lags of a seed next to each other."""
        codes = {objective: code_of(objective) for objective in self.objectives}
        return [
            Key(objective, lag, seed, self.steps, self.updates, codes[objective])
            for seed in self.seeds
            for lag in self.lags
            for objective in self.objectives
        ]


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line; argparse ends the process with status 2 on a fault."""
    parser = argparse.ArgumentParser(
        prog="headway bench lag", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lags", default="0,1,2,4,8,16", help="0, which all are compared with, and others")
    parser.add_argument("--objectives", default=f"{DEFAULT},{UNCORRECTED}", help=", ".join(OBJECTIVES))
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="updates after which rewards are compared")
    parser.add_argument(
        "--cells", type=Path, default=Path("lag-cells.jsonl"), help="finished cells, appended to"
    )
    parser.add_argument("--plot", type=Path, help="picture: svg, png or pdf")
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON lines")
    given = parser.parse_args(arguments)
    objectives = list(dict.fromkeys(given.objectives.split(",")))
    try:
        lags = sorted({int(lag) for lag in given.lags.split(",")})
    except ValueError:
        parser.error(f"--lags {given.lags!r}: whole numbers, separated by commas")
    if lags[0] != 0:
        parser.error(f"--lags {given.lags!r}: 0 is among them, and nothing below")
    if unknown := [each for each in objectives if each not in OBJECTIVES]:
        parser.error(f"--objectives {unknown[0]!r}: expected {', '.join(OBJECTIVES)}")
    if given.seeds < 1 or given.first_seed < 0 or given.steps < WINDOW:
        parser.error(f"--seeds is at least 1, --first-seed 0, --steps {WINDOW}")
    seeds = list(range(given.first_seed, given.first_seed + given.seeds))
    return Options(lags, objectives, seeds, given.steps, given.cells, given.plot, given.out)


def run_bench(options: Options) -> bool:
    """Measure what is missing and show all; whether the default objective holds its aims."""
    console, cells, wanted = wide_console(), read_cells(options.cells), options.keys()
    for key in wanted:
        if key in cells:
            continue
        cell = measure(key)
        with options.cells.open("ab") as file:
            file.write(msgspec.json.encode(cell) + b"\n")
        cells[key] = cell
        console.print(
            f"{cell.objective}, lag {cell.lag} (mean {cell.lag_mean:.2f}), seed {cell.seed}: reward "
            f"{cell.reward:.3f}, {cell.seconds[-1]:.0f} s",
            highlight=False,
        )
    chosen = [cells[key] for key in wanted]
    judged = judge(chosen)
    console.print(table(judged, options.steps))
    if options.plot is not None:
        draw(chosen, options.plot)
    if options.out is not None:
        seeds = ",".join(map(str, options.seeds))
        rows = [
            make_row(
                "lag",
                f"{each.objective}, lag {each.lag}",
                "reward",
                each.rewards,
                config={
                    "steps": options.steps,
                    "updates": options.updates,
                    "window": WINDOW,
                    "seeds": seeds,
                    "samples": 64,
                    "recipe": code_of(each.objective),
                },
                ratios={"of lag 0": each.shares},
            )
            for each in judged
        ]
        write_rows(rows, options.out)
    aims = [(each, AIMS[each.lag]) for each in judged if each.objective == DEFAULT and each.lag in AIMS]
    if not aims:
        console.print("no aim was judged: they are of cispo at lag 4 and 8", highlight=False)
    return all(quantiles(each.shares).p50 >= aim for each, aim in aims)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry; 0: the aims that were asked for hold, 1: one does not, 2: it could not run."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    return exit_status(lambda: run_bench(options))


if __name__ == "__main__":
    raise SystemExit(main())
