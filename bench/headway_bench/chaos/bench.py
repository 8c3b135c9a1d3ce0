"""`headway bench chaos`: many random schedules, one after the other.

Prints each schedule with its outcome; a broken invariant names the seed, which plays it again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from headway.errors import HeadwayError
from headway_bench.chaos.play import Outcome, Play
from headway_bench.chaos.schedule import HEARTBEAT_S, make_schedule
from headway_bench.chaos.verify import faults_of
from headway_bench.harness import make_row, quantiles, results_folder, rows_table, write_rows


def main(argv: Sequence[str]) -> int:
    """Runs the schedules; 0 when every invariant held in all of them."""
    arguments = _arguments(argv)
    seeds = arguments.seed or range(arguments.first, arguments.first + arguments.schedules)
    outcomes: list[Outcome] = []
    broken = 0
    for seed in seeds:
        outcome, faults = play(seed, arguments.steps, keep=arguments.keep)
        broken += bool(faults)
        if outcome is not None:
            outcomes.append(outcome)
    noticed = [seconds for outcome in outcomes for _, seconds in outcome.noticed_s]
    struck = sum(len(outcome.struck) for outcome in outcomes)
    print(f"{len(seeds)} schedules, {broken} with a broken invariant; {struck} faults struck")
    if noticed:
        spread = quantiles(noticed)
        print(
            f"noticed after {spread.format()} s, at most {max(noticed):.2f} s, in {len(noticed)} cases; "
            f"twice the heartbeat is {2 * HEARTBEAT_S:g} s"
        )
        config = {"schedules": len(seeds), "broken": broken, "heartbeat_s": HEARTBEAT_S}
        rows = [make_row("chaos", "time to notice", "s", noticed, config=config)]
        rows.append(
            make_row("chaos", "wall time of a schedule", "s", [o.wall_s for o in outcomes], config=config)
        )
        Console().print(rows_table("chaos", rows))
        if arguments.out is not None:
            write_rows(rows, results_folder(arguments.out, "chaos") / "rows.jsonl")
    return 1 if broken else 0


def play(seed: int, steps: int, *, keep: bool = False) -> tuple[Outcome | None, list[str]]:
    """One schedule; its outcome (None when it did not end) and what was broken."""
    schedule = make_schedule(seed, steps)
    print(schedule, flush=True)
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
    game = Play(schedule, folder)
    outcome: Outcome | None = None
    try:
        outcome = game.play()
        faults = faults_of(game.run)
        faults += [f"attempt {number} failed without a cause" for number in _silent(outcome)]
        faults += [f"left behind: {process}" for process in game.processes()]
    except HeadwayError as error:
        faults = [f"{type(error).__name__}: {error}"]
    for fault in faults:
        print(f"  BROKEN {fault}", flush=True)
    if outcome is not None:
        ends = ", ".join(status for status, _ in outcome.ends)
        print(f"  {ends} in {outcome.wall_s:.0f} s, {len(outcome.struck)} struck", flush=True)
    if faults or keep:
        print(f"  kept: {folder}", flush=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome, faults


def _silent(outcome: Outcome) -> list[int]:
    return [
        number for number, (status, cause) in enumerate(outcome.ends, 1) if status == "failed" and not cause
    ]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("headway bench chaos", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10, help="how many")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--seed", type=int, action="append", help="play this one; may be given several times")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a run")
    parser.add_argument("--keep", action="store_true", help="keep the folders of sound runs too")
    parser.add_argument("--out", type=Path, help="folder for the rows")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
