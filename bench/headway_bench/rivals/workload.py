"""The workloads that every contestant runs, and the report that every contestant leaves.

Imported by the bench and by the runners, so it imports the standard library only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class Workload:
    """The same work for everybody: digit sorting with AdamW, clip 1.0, temperature 1, no KL, constant lr.

    Attributes:
        name: its name on the command line.
        digits: digits per prompt; a prompt has digits + 3 tokens.
        prompts: prompts per optimizer step.
        completions: completions per prompt.
        max_tokens: most tokens of one completion.
        forced_length: sample exactly max_tokens tokens, never the end of the sequence.
        steps: optimizer steps.
        lr: learning rate after the warm-up.
        lr_warmup_steps: optimizer steps of linear warm-up.
    """

    name: str
    digits: int
    prompts: int
    completions: int
    max_tokens: int
    forced_length: bool
    steps: int
    lr: float = 1e-4
    lr_warmup_steps: int = 10

    @property
    def samples_per_step(self) -> int:
        """Completions that one optimizer step trains on."""
        return self.prompts * self.completions

    @property
    def prompt_tokens(self) -> int:
        """Tokens of one prompt: begin, `s`, the digits, `=`."""
        return self.digits + 3


W1 = Workload("w1", digits=5, prompts=8, completions=16, max_tokens=8, forced_length=False, steps=100)
W2 = Workload("w2", digits=5, prompts=4, completions=8, max_tokens=128, forced_length=True, steps=6)
WORKLOADS = {workload.name: workload for workload in (W1, W2)}


@dataclass(frozen=True)
class Report:
    """What one run of one contestant measured. headway's summary.json carries the same keys.

    Attributes:
        status: "completed", or why the run ended early.
        updates: optimizer steps done.
        wall_s: seconds from the first ticket (the first call of the sampler) to the last update.
        samples_per_s: completions trained on per second of wall_s.
        reward_last_10: mean reward of the last ten updates.
        max_lag_seen: largest lag of a trained token, in optimizer steps.
        details: further figures of the contestant, by name: seconds by stage, tokens per second, versions.
    """

    status: str
    updates: int
    wall_s: float
    samples_per_s: float
    reward_last_10: float
    max_lag_seen: int
    details: dict[str, float | str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class RunnerOptions:
    """The command line that every runner takes."""

    workload: Workload
    seed: int
    checkpoint: Path
    report: Path
    threads: int


def parse_runner_options(arguments: Sequence[str] | None = None) -> RunnerOptions:
    """Read a runner's command line; --steps overrides the workload's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps; 0: the workload's own")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder in transformers format")
    parser.add_argument("--report", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of every process")
    given = parser.parse_args(arguments)
    workload = WORKLOADS[given.workload]
    if given.steps:
        workload = replace(workload, steps=given.steps)
    return RunnerOptions(
        workload, given.seed, given.checkpoint.resolve(), given.report.resolve(), given.threads
    )


def mean_of_last(values: Sequence[float], count: int) -> float:
    """Mean of the last `count` values, of all if there are fewer; nan if there are none."""
    last = list(values)[-count:]
    return sum(last) / len(last) if last else float("nan")
