"""`headway bench optimise`: what headway plan --optimise proposes, against the best of a grid of real runs.

Two set-ups whose device time is modelled by sleeps, one bound by generation, one by the learner. Each has its grid of
thirty recipes over batch.prompts, staleness.max_lag and generator.max_running; a mean lag of at most four updates is
allowed. The search starts from one of the recipes and sees the rates only. The best cells that keep the limit run again
together with what it proposes, in turns, with other lengths and for as many updates as the search looks at, and the
medians are compared: a maximum of thirty short runs would flatter the grid.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from headway.config import RunConfig
from headway.planner import Curve, Scenario, constant, scenario_of
from headway.planner.search import Limits, Search
from headway_bench.harness import (
    exit_status,
    interleave,
    make_row,
    quantiles,
    ratios_by_round,
    wide_console,
    write_rows,
)
from headway_bench.shaped.bench import MOST_LAG_ERROR, Overhead, calibrated
from headway_bench.shaped.cases import LONG_TAIL, QUICK, shape
from headway_bench.shaped.play import PROMPT_TOKENS, Measured, config_of, play, recipe
from headway_bench.shaped.shape import Shape

AIM = 0.95  # of the best cell
MOST_LAG = 4.0  # mean
PROMPTS, LAGS, RUNNING = (4, 8), (1, 2, 4, 8, 16), (16, 64, 128)
START = (4, 1, 16)
FINALISTS = 3
SEARCHED_STEPS, SEARCHED_WARMUP = 60, 12


@dataclass(frozen=True)
class Setup:
    """A shape, and how many updates the grid's runs have; the first `warmup` do not count."""

    shape: Shape
    steps: int
    warmup: int


SETUPS = {
    "generation-bound": Setup(shape(QUICK, LONG_TAIL), steps=24, warmup=10),
    "learner-bound": Setup(shape(Curve([(0, 0.4), (4000, 4.4)]), LONG_TAIL), steps=14, warmup=6),
}


@dataclass(frozen=True)
class Point:
    """A recipe of the grid, or the proposed one."""

    prompts: int
    max_lag: int
    running: int
    interval: int = 1

    @property
    def name(self) -> str:
        """For tables and rows."""
        told = f"prompts {self.prompts}, max_lag {self.max_lag}, max_running {self.running}"
        return f"{told}, push.interval {self.interval}" if self.interval > 1 else told

    def recipe(self, shape: Shape, steps: int) -> dict[str, Any]:
        """With so many updates."""
        return recipe(
            shape,
            steps=steps,
            batch={"prompts": self.prompts},
            staleness={"max_lag": self.max_lag},
            generator={"max_running": self.running},
            push={"interval": self.interval},
        )


GRID = tuple(Point(*each) for each in itertools.product(PROMPTS, LAGS, RUNNING))


def proposed(shape: Shape, overhead: Overhead) -> tuple[Point, float]:
    """What the search makes of the recipe that it starts from, and its tokens per second."""
    measured = msgspec.structs.replace(
        shape.rates(0, 4, 4096, PROMPT_TOKENS),  # recipe() has 4 samples
        turn=overhead.turn,
        publish=constant(shape.publish + overhead.push),
    )

    def make(config: RunConfig) -> Scenario:
        return scenario_of(config, measured, warmup=SEARCHED_WARMUP, beside=False)

    start = config_of(Point(*START).recipe(shape, SEARCHED_STEPS))
    found = Search(start, make, Limits(lag=MOST_LAG, running=max(RUNNING))).run()
    config = found.config
    point = Point(
        config.batch.prompts, config.staleness.max_lag, config.generator.max_running, config.push.interval
    )
    return point, found.forecast.tokens_per_s


@dataclass(frozen=True)
class Result:
    """One set-up: the grid, and the finalists by round."""

    name: str
    found: Point
    grid: dict[Point, Measured]
    finals: dict[Point, dict[int, Measured]]

    def rates(self, point: Point) -> dict[int, float]:
        """Tokens per second of its finals, by round."""
        return {turn: each.tokens_per_s for turn, each in self.finals[point].items()}

    @property
    def best(self) -> Point:
        """Of the grid, by its finals."""
        cells = [point for point in self.finals if point in self.grid]
        return max(cells, key=lambda point: quantiles(list(self.rates(point).values())).p50)

    @property
    def ratios(self) -> list[float]:
        """Proposed over the best of the grid, by round."""
        return ratios_by_round(self.rates(self.found), self.rates(self.best))

    @property
    def holds(self) -> bool:
        """What is proposed is as near to the best as it must be, and keeps the limit as well as a plan may know it."""
        lag = quantiles([each.lag_mean for each in self.finals[self.found].values()]).p50
        return quantiles(self.ratios).p50 >= AIM and lag <= MOST_LAG + MOST_LAG_ERROR


def measure(name: str, rounds: int, overhead: Overhead, note: Callable[[str], None]) -> Result:
    """The whole grid once, then its best cells and the proposed one `rounds` times with other lengths."""
    setup = SETUPS[name]

    def run(point: Point, seed: int, steps: int, warmup: int) -> Measured:
        real = play(setup.shape, point.recipe(setup.shape, steps), seed, warmup)
        note(f"{name}, {point.name}: {real.tokens_per_s:.0f} tokens/s at a mean lag of {real.lag_mean:.2f}")
        return real

    found, planned = proposed(setup.shape, overhead)
    note(f"{name}: proposed {found.name}: {planned:.0f} tokens/s planned")
    grid = {point: run(point, 0, setup.steps, setup.warmup) for point in GRID}
    kept = [point for point in GRID if grid[point].lag_mean <= MOST_LAG]
    finalists = sorted(kept, key=lambda point: grid[point].tokens_per_s, reverse=True)[:FINALISTS]
    if found not in finalists:
        finalists.append(found)
    finals: dict[Point, dict[int, Measured]] = {point: {} for point in finalists}
    for turn, point in interleave(finalists, rounds):
        finals[point][turn] = run(point, 1 + turn, SEARCHED_STEPS, SEARCHED_WARMUP)
    return Result(name, found, grid, finals)


def table(results: Sequence[Result]) -> Table:
    """The recipe that the search starts from, the best of the grid and the proposed one."""
    shown = Table(title=f"tokens/s, mean lag at most {MOST_LAG:g}", title_justify="left")
    for column in ("set-up", "recipe", "tokens/s", "mean lag", "proposed over it"):
        shown.add_column(column, justify="left" if column in ("set-up", "recipe") else "right")
    for result in results:
        start = Point(*START)
        before = result.grid[start]
        best, ours = (quantiles(list(result.rates(point).values())) for point in (result.best, result.found))
        best_lag, our_lag = (
            quantiles([each.lag_mean for each in result.finals[point].values()]).p50
            for point in (result.best, result.found)
        )
        shown.add_row(
            result.name,
            f"as it was: {start.name}",
            f"{before.tokens_per_s:.0f}",
            f"{before.lag_mean:.2f}",
            f"{ours.p50 / before.tokens_per_s:.2f}",
        )
        shown.add_row(
            result.name,
            f"best of the grid: {result.best.name}",
            best.format(0),
            f"{best_lag:.2f}",
            quantiles(result.ratios).format(),
        )
        shown.add_row(result.name, f"proposed: {result.found.name}", ours.format(0), f"{our_lag:.2f}", "")
    return shown


def run_bench(options: argparse.Namespace) -> bool:
    """Measure and show; whether every proposal is near enough to its grid's best."""
    console = wide_console()
    overhead = calibrated()
    results = [
        measure(name, options.rounds, overhead, lambda line: console.print(line, highlight=False))
        for name in SETUPS
        if options.only in name
    ]
    console.print(table(results))
    if options.out is not None:
        rows = [
            make_row(
                "optimise",
                f"{result.name}/{'proposed' if point == result.found else point.name}",
                "tokens/s",
                list(result.rates(point).values()),
                config={"recipe": point.name, "most_lag": MOST_LAG},
                ratios={"of the best": ratios_by_round(result.rates(point), result.rates(result.best))},
            )
            for result in results
            for point in result.finals
        ]
        write_rows(rows, options.out)
    return all(result.holds for result in results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry; 0: every proposal is near enough, 1: one is not, 2: it could not run."""
    parser = argparse.ArgumentParser(prog="headway bench optimise", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of the best cells and the proposed one")
    parser.add_argument("--only", default="", help="set-ups whose name contains this")
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON lines")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not any(options.only in name for name in SETUPS):
        parser.error(f"--only {options.only!r}: the set-ups are {', '.join(SETUPS)}")
    return exit_status(lambda: run_bench(options))


if __name__ == "__main__":
    raise SystemExit(main())
