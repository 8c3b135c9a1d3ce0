"""headway against its rivals on the same work: `headway bench rival`.

Every contestant runs in a process of its own with both cores, in interleaved rounds, from the same
checkpoint, with a seed per round. What counts is the ratio of samples per wall second within a round,
from the first ticket to the last update. docs/benchmarks.md says what each is given and how to read the
result.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console

from headway_bench.contestants import CONTESTANTS, HEADWAY, USUAL, Contestant, Job, run_contestant
from headway_bench.environment import RivalEnvironment, starting_checkpoint
from headway_bench.harness import (
    Row,
    exit_status,
    interleave,
    make_row,
    ratios_by_round,
    results_folder,
    rows_table,
    wide_console,
    write_rows,
)
from headway_bench.machine import installed_versions
from headway_bench.rivals.workload import WORKLOADS, Workload
from headway_bench.verdict import Finding, Outcome, findings, findings_table

FIRST_SEED = 42


@dataclass(frozen=True)
class Options:
    """The command line of the bench."""

    rounds: int
    workloads: list[Workload]
    contestants: list[Contestant]
    checkpoint: Path | None
    venv: Path
    results: Path
    deadline_s: float


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line; argparse ends the process with status 2 on a fault."""
    parser = argparse.ArgumentParser(prog="headway bench rival", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="runs of every contestant, one a round")
    parser.add_argument("--workload", choices=(*WORKLOADS, "both"), default="both")
    parser.add_argument(
        "--contestants",
        type=contestant_list,
        default=list(USUAL),
        metavar="NAMES",
        help=f"comma-separated, of: {', '.join(CONTESTANTS)}",
    )
    parser.add_argument(
        "--steps", type=positive, default=None, help="optimizer steps, instead of the workload's"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=None,
        help="folder of the model to start from; made and cached if not given",
    )
    parser.add_argument(
        "--venv", type=Path, default=Path(".venv-rivals"), help="environment of the rivals; made if missing"
    )
    parser.add_argument("--results", type=Path, default=Path("runs/bench"), help="folder for results")
    parser.add_argument("--deadline-s", type=float, default=900.0, help="for one run of one contestant")
    given = parser.parse_args(arguments)
    workloads = list(WORKLOADS.values()) if given.workload == "both" else [WORKLOADS[given.workload]]
    if given.steps:
        workloads = [replace(workload, steps=given.steps) for workload in workloads]
    return Options(
        rounds=given.rounds,
        workloads=workloads,
        contestants=given.contestants,
        checkpoint=given.checkpoint.resolve() if given.checkpoint else None,
        venv=given.venv,
        results=given.results,
        deadline_s=given.deadline_s,
    )


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def contestant_list(text: str) -> list[Contestant]:
    """Contestants by comma-separated names, each once, in the order given."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no contestant is called {', '.join(map(repr, unknown))}; there are: {', '.join(CONTESTANTS)}"
        )
    return [CONTESTANTS[name] for name in names]


def run_workload(
    options: Options, workload: Workload, python: Path, checkpoint: Path, folder: Path, console: Console
) -> list[Outcome]:
    """All rounds of one workload; every outcome is appended to runs.jsonl as soon as it is there."""
    outcomes: list[Outcome] = []
    with (folder / "runs.jsonl").open("ab") as record:
        for turn, contestant in interleave(options.contestants, options.rounds):
            job = Job(
                workload=workload,
                seed=FIRST_SEED + turn,
                folder=folder / workload.name / f"round-{turn}" / contestant.name,
                checkpoint=checkpoint,
                deadline_s=options.deadline_s,
            )
            load = os.getloadavg()[0]
            report = run_contestant(contestant, job, python)
            outcome = Outcome(workload.name, contestant.name, turn, job.seed, load, report)
            outcomes.append(outcome)
            record.write(msgspec.json.encode(outcome) + b"\n")
            record.flush()
            console.print(
                f"{workload.name} round {turn + 1}/{options.rounds} {contestant.name:<12}"
                f"{report.samples_per_s:8.1f} samples/s  reward {report.reward_last_10:.3f}"
                f"  lag <= {report.max_lag_seen}  {report.wall_s:6.1f} s  (load before: {load:.1f})",
                highlight=False,
                soft_wrap=True,
            )
    return outcomes


def throughput(outcomes: Sequence[Outcome], workload: str, contestant: str) -> dict[int, float]:
    """Samples per second by round."""
    return {
        outcome.turn: outcome.report.samples_per_s
        for outcome in outcomes
        if (outcome.workload, outcome.contestant) == (workload, contestant)
    }


def outcome_rows(
    options: Options, outcomes: Sequence[Outcome], rival_versions: Mapping[str, str]
) -> list[Row]:
    """A row per workload and contestant, headway's with its ratio to every rival."""
    rows: list[Row] = []
    for workload in options.workloads:
        for contestant in options.contestants:
            values = throughput(outcomes, workload.name, contestant.name)
            ratios = {
                f"over {rival.name}": ratios_by_round(values, throughput(outcomes, workload.name, rival.name))
                for rival in options.contestants
                if contestant.name == HEADWAY and rival.name != HEADWAY
            }
            versions = installed_versions() if contestant.name == HEADWAY else rival_versions
            rows.append(
                make_row(
                    "rival",
                    f"{workload.name}/{contestant.name}",
                    "samples/s",
                    [values[turn] for turn in sorted(values)],
                    config={**asdict(workload), "contestant": contestant.title},
                    ratios=ratios,
                    versions=versions,
                )
            )
    return rows


def run_bench(options: Options, console: Console) -> list[Finding]:
    """Run everything, save rows.jsonl, show the tables.

    Raises:
        RunFailed: a contestant did not finish; what ran before it is in runs.jsonl.
        BackendUnavailable: the rivals' environment or a recipe is not what it should be.
    """

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    environment = RivalEnvironment(options.venv, say)
    checkpoint = options.checkpoint or starting_checkpoint(say)
    folder = results_folder(options.results, "rival").resolve()
    say(f"results: {folder}")
    outcomes: list[Outcome] = []
    for workload in options.workloads:
        outcomes += run_workload(options, workload, environment.python, checkpoint, folder, console)
    rows = outcome_rows(options, outcomes, environment.versions)
    write_rows(rows, folder / "rows.jsonl")
    console.print(rows_table("samples per second, first ticket to last update", rows))
    found = findings(outcomes)
    if found:
        console.print(findings_table(found))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; 0: every claim that could be checked held, 1: one did not, 2: it could not run."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    return exit_status(lambda: all(finding.held for finding in run_bench(options, wide_console())))


if __name__ == "__main__":
    raise SystemExit(main())
