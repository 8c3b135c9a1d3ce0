"""`headway bench plan`: predictions against real runs, most of them with device time that is modelled by sleeps.

Every case of headway_bench.shaped.cases is planned and run with the same lengths. What no sleep says, the learner's own
messages and records and the true cost of a tiny push, is calibrated first, by a short run of another seed. A run on a
busy machine is slower than its sleeps, so the median over seeds is judged. Runs without sleeps
(headway_bench.shaped.plain) are planned from what `headway calibrate` finds, and may also be off by their own spread.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.table import Table

from headway.planner import Forecast, Rates, Scenario, constant, scenario_of, simulate
from headway_bench.harness import Row, make_row, quantiles, wide_console, write_rows
from headway_bench.shaped import plain
from headway_bench.shaped.cases import CASES, Case
from headway_bench.shaped.play import PROMPT_TOKENS, Measured, config_of, play

MOST_RATE_ERROR = 0.10
MOST_LAG_ERROR = 0.3
MOST_IDLE_ERROR = 0.05
FIGURES: dict[str, tuple[str, float]] = {
    "tokens_per_s": ("tokens/s", MOST_RATE_ERROR),
    "lag_mean": ("mean lag", MOST_LAG_ERROR),
    "learner_idle": ("learner idle", MOST_IDLE_ERROR),
    "generator_idle": ("generator idle", MOST_IDLE_ERROR),
}


@dataclass(frozen=True)
class Compared:
    """One case: what was predicted and what came, by seed; shaped: by sleeps."""

    name: str
    planned: list[Forecast]
    real: list[Measured]
    shaped: bool = True

    def medians(self, figure: str) -> tuple[float, float]:
        """Of the predictions and of the runs."""
        return (
            statistics.median(float(getattr(each, figure)) for each in self.planned),
            statistics.median(float(getattr(each, figure)) for each in self.real),
        )

    def last(self, seed: int) -> str:
        """The newest pair, in words."""
        planned, real = self.planned[-1], self.real[-1]
        pairs = (f"{figure} {getattr(planned, figure):.2f}/{getattr(real, figure):.2f}" for figure in FIGURES)
        return f"{self.name}, seed {seed}: {', '.join(pairs)}"

    def error(self, figure: str) -> float:
        """Predicted less real: relative for rates, else as it is."""
        planned, real = self.medians(figure)
        return planned / max(1e-9, real) - 1.0 if figure == "tokens_per_s" else planned - real

    def most(self, figure: str) -> float:
        """How far off a figure may be: without sleeps, a rate by the 20th to 80th percentile of the runs too."""
        most = FIGURES[figure][1]
        if self.shaped or figure != "tokens_per_s":
            return most
        spread = quantiles([each.tokens_per_s for each in self.real])
        return max(most, (spread.p80 - spread.p20) / max(1e-9, spread.p50))

    @property
    def holds(self) -> bool:
        """Whether every figure is as near as it must be."""
        return all(abs(self.error(figure)) <= self.most(figure) for figure in FIGURES)


@dataclass(frozen=True)
class Overhead:
    """Seconds of an update that the learner spends beside its sleeps: on messages and records, and on its push."""

    turn: float = 0.0
    push: float = 0.0


def calibrated(steps: int = 12, seed: int = 1000) -> Overhead:
    """From a run of the first case."""
    case = CASES[0]
    real = play(case.shape, case.recipe(steps), seed, warmup=2)
    return Overhead(real.learner_other_s, max(0.0, real.learner_push_s - case.shape.publish))


def scenario(case: Case, steps: int, warmup: int, seed: int, overhead: Overhead) -> Scenario:
    """The case as the planner sees it, with the lengths that the run of this seed will have."""
    config = config_of(case.recipe(steps))
    num_groups = 4 * (steps + 16) * config.batch.prompts
    rates = case.shape.rates(seed, config.batch.samples, num_groups, PROMPT_TOKENS)
    rates = msgspec.structs.replace(
        rates, turn=overhead.turn, publish=constant(case.shape.publish + overhead.push)
    )
    return scenario_of(config, rates, warmup=warmup, in_order=True, beside=False)


def compare(
    case: Case,
    steps: int,
    warmup: int,
    seeds: Sequence[int],
    overhead: Overhead,
    note: Callable[[str], None] = lambda line: None,
) -> Compared:
    """Plan and run it with every seed."""
    result = Compared(case.name, [], [])
    for seed in seeds:
        result.planned.append(simulate(scenario(case, steps, warmup, seed, overhead), seed))
        result.real.append(play(case.shape, case.recipe(steps), seed, warmup))
        note(result.last(seed))
    return result


def compare_plain(
    name: str,
    rates: Rates,
    steps: int,
    warmup: int,
    seeds: Sequence[int],
    note: Callable[[str], None] = lambda line: None,
) -> Compared:
    """The same of a plain run, planned from a calibration."""
    result = Compared(name, [], [], shaped=False)
    for seed in seeds:
        config = plain.config_of(name, steps, seed)
        result.planned.append(simulate(scenario_of(config, rates, warmup=warmup), seed))
        result.real.append(plain.play(config, warmup))
        note(result.last(seed))
    return result


def table(results: Sequence[Compared]) -> Table:
    """Predicted, real and error of every figure."""
    shown = Table(title="predicted / real (error)", title_justify="left")
    shown.add_column("run")
    for title, _ in FIGURES.values():
        shown.add_column(title, justify="right")
    shown.add_column("holds")
    for result in results:
        cells: list[str] = []
        for figure in FIGURES:
            planned, real = result.medians(figure)
            if figure == "lag_mean":
                cells.append(f"{planned:.2f} / {real:.2f} ({result.error(figure):+.2f})")
            elif figure == "tokens_per_s":
                cells.append(f"{planned:.0f} / {real:.0f} ({result.error(figure):+.1%})")
            else:
                cells.append(f"{planned:.1%} / {real:.1%} ({100 * result.error(figure):+.1f})")
        shown.add_row(result.name, *cells, "yes" if result.holds else "NO")
    return shown


def rows(results: Sequence[Compared], steps: int, warmup: int) -> list[Row]:
    """A row per case and figure, values by seed."""
    return [
        make_row(
            "plan",
            f"{result.name}/{title}",
            "tokens/s" if figure == "tokens_per_s" else "updates" if figure == "lag_mean" else "share",
            [float(getattr(each, figure)) for each in result.real],
            config={"steps": steps, "warmup": warmup, "predicted": result.medians(figure)[0]},
        )
        for result in results
        for figure, (title, _) in FIGURES.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry. Returns 1 when a prediction is further off than it may be."""
    parser = argparse.ArgumentParser(prog="headway bench plan", description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="updates of a run")
    parser.add_argument("--warmup", type=int, default=5, help="of them, first ones that do not count")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON lines")
    options = parser.parse_args(arguments)
    chosen = [case for case in CASES if options.only in case.name]
    unshaped = [name for name in plain.CASES if options.only in name]
    if not (chosen or unshaped) or not 0 < options.warmup < options.steps or options.seeds < 1:
        parser.error(
            f"nothing to run; the cases are: {', '.join([*(case.name for case in CASES), *plain.CASES])}"
        )
    console = wide_console()
    seeds = range(options.seeds)
    results: list[Compared] = []
    if chosen:
        overhead = calibrated()
        console.print(f"of an update, messages and records {overhead.turn:.3f} s, push {overhead.push:.3f} s")
        results += [
            compare(case, options.steps, options.warmup, seeds, overhead, console.print) for case in chosen
        ]
    if unshaped:
        rates = plain.calibrated(console.print)
        results += [
            compare_plain(name, rates, options.steps, options.warmup, seeds, console.print)
            for name in unshaped
        ]
    console.print(table(results))
    if options.out is not None:
        write_rows(rows(results, options.steps, options.warmup), options.out)
    return 0 if all(result.holds for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
