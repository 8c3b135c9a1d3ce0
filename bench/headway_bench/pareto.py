"""`headway bench loop RECIPE`: whole runs of a recipe over max_lag and batch: throughput x lag x ESS x batch.

Every cell is a real run for some seconds, a third of them to warm up. Of each batch size those cells are marked that no
other one beats in all of tokens/s, mean lag and effective sample size (ESS): whoever picks a cell without a mark
gives something away. The recipe's file and any of its keys are given as to headway run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from headway.cli.running import recipe
from headway.config import RunConfig
from headway.config.loading import validate
from headway.errors import ConfigError, HeadwayError
from headway.tune.outcome import WARM_UP, Outcome, endless, outcome, rows_of
from headway_bench.harness import (
    Row,
    exit_status,
    interleave,
    make_row,
    quantiles,
    ratios_by_round,
    wide_console,
    write_rows,
)


@dataclass(frozen=True)
class Cell:
    """One setting."""

    prompts: int
    max_lag: int

    @property
    def name(self) -> str:
        """For tables and rows."""
        return f"{self.prompts} prompts, max_lag {self.max_lag}"

    def config(self, base: RunConfig, run_dir: Path) -> RunConfig:
        """The recipe with it, as `endless` says.

        Raises:
            ConfigError: it contradicts the rest of the recipe.
        """
        data = endless(base, run_dir)
        data["batch"]["prompts"], data["staleness"]["max_lag"] = self.prompts, self.max_lag
        data["staleness"].update(window=0, slots=0)
        return validate(data)


@dataclass(frozen=True)
class Measured:
    """A run of a cell: what `headway tune` measures, and the mean ESS of its updates after the warm-up."""

    outcome: Outcome
    ess: float


def measure(cell: Cell, base: RunConfig, seconds: float) -> Measured:
    """Run it in a folder that is removed afterwards.

    Raises:
        HeadwayError: the run failed, or made too few updates to say anything.
    """
    with tempfile.TemporaryDirectory(prefix="loop-") as folder:
        rows = rows_of(cell.config(base, Path(folder) / "run"), seconds)
    since_s = seconds * WARM_UP
    ess = statistics.fmean(row.ess for row in rows if row.elapsed_s >= since_s)
    return Measured(outcome(rows, since_s), ess)


@dataclass(frozen=True)
class Summary:
    """A cell's runs, medians over the rounds."""

    cell: Cell
    runs: dict[int, Measured]

    def median(self, figure: str) -> float:
        """Of a figure of the outcome, or the ESS."""
        return statistics.median(
            run.ess if figure == "ess" else float(getattr(run.outcome, figure)) for run in self.runs.values()
        )

    @property
    def rates(self) -> dict[int, float]:
        """Trained tokens per second by round."""
        return {turn: run.outcome.tokens_per_s for turn, run in self.runs.items()}

    def beats(self, other: Summary) -> bool:
        """At least as good in tokens/s, lag and ESS, and better in one."""
        mine, theirs = (
            (each.median("tokens_per_s"), -each.median("lag_mean"), each.median("ess"))
            for each in (self, other)
        )
        return mine != theirs and all(a >= b for a, b in zip(mine, theirs, strict=True))


def front(summaries: Sequence[Summary]) -> list[Summary]:
    """Those that no other one of the same batch size beats."""
    return [
        each
        for each in summaries
        if not any(other.cell.prompts == each.cell.prompts and other.beats(each) for other in summaries)
    ]


def table(summaries: Sequence[Summary], title: str) -> Table:
    """One line per cell."""
    best = {each.cell for each in front(summaries)}
    by_cell = {each.cell: each for each in summaries}
    shown = Table(title=title, title_justify="left")
    columns = (
        "prompts",
        "max_lag",
        "tokens/s",
        "over max_lag 0",
        "mean lag",
        "ESS",
        "learner idle",
        "generators idle",
    )
    for column in (*columns, "front"):
        shown.add_column(column, justify="right")
    for each in summaries:
        base = by_cell.get(Cell(each.cell.prompts, 0))
        ratios = ratios_by_round(each.rates, base.rates) if base is not None else []
        shown.add_row(
            str(each.cell.prompts),
            str(each.cell.max_lag),
            quantiles(list(each.rates.values())).format(0),
            quantiles(ratios).format() if ratios else "-",
            f"{each.median('lag_mean'):.2f}",
            f"{each.median('ess'):.4f}",
            f"{each.median('learner_idle'):.0%}",
            f"{each.median('generator_idle'):.0%}",
            "*" if each.cell in best else "",
        )
    return shown


def draw(summaries: Sequence[Summary], title: str, target: Path) -> None:
    """Tokens per second against mean lag, a line per batch size, coloured by ESS; the front has a ring."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "headway"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for prompts in sorted({each.cell.prompts for each in summaries}):
        mine = [each for each in summaries if each.cell.prompts == prompts]
        axes.plot(
            [each.median("lag_mean") for each in mine],
            [each.median("tokens_per_s") for each in mine],
            color="#9ca3af",
            zorder=1,
        )
        last = mine[-1]
        axes.annotate(
            f" {prompts} prompts", (last.median("lag_mean"), last.median("tokens_per_s")), fontsize="small"
        )
    for group, ring in ((summaries, "none"), (front(summaries), "#111827")):
        points = axes.scatter(
            [each.median("lag_mean") for each in group],
            [each.median("tokens_per_s") for each in group],
            c=[each.median("ess") for each in group],
            cmap="viridis",
            edgecolors=ring,
            s=60,
            zorder=2,
        )
        points.set_clim(min(each.median("ess") for each in summaries), 1.0)
    figure.colorbar(points, label="effective sample size (share)")
    axes.set(
        title=title, xlabel="mean lag of a trained token (updates)", ylabel="trained tokens/s", ylim=(0, None)
    )
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, RunConfig, list[Cell]]:
    """Our own options, the recipe that the other words say, and the cells.

    Raises:
        ConfigError: there is no recipe, or it is wrong with one of the cells.
    """
    parser = argparse.ArgumentParser(
        prog="headway bench loop",
        description=__doc__,
        usage="headway bench loop RECIPE.toml [--section.key VALUE ...] [--lags 0,1,2] [--prompts 4,8] [--seconds S] "
        "[--rounds N] [--plot FILE] [--out FILE]",
        allow_abbrev=False,
    )
    parser.add_argument("--lags", default="0,1,2,4,8", help="values of staleness.max_lag")
    parser.add_argument(
        "--prompts", default="", help="values of batch.prompts; without: half, one and two times it"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run; a third of it warms up")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="picture: svg, png or pdf")
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON lines")
    options, others = parser.parse_known_args(words)
    if options.seconds <= 0 or options.rounds < 1:
        parser.error("--seconds must be above 0, --rounds at least 1")
    lags = numbers(parser, "--lags", options.lags, least=0)
    prompts = numbers(parser, "--prompts", options.prompts, least=1) if options.prompts else []
    config = recipe(others)
    own = config.batch.prompts
    prompts = prompts or sorted({max(1, own // 2), own, 2 * own})
    cells = [Cell(*each) for each in itertools.product(prompts, lags)]
    for cell in cells:
        try:
            cell.config(config, Path("unused"))
        except ConfigError as error:
            raise ConfigError([(f"{path} with {cell.name}", fault) for path, fault in error.faults]) from None
    return options, config, cells


def numbers(parser: argparse.ArgumentParser, option: str, text: str, least: int) -> list[int]:
    """Ascending whole numbers; argparse ends the process with status 2 on a fault."""
    try:
        values = sorted({int(each) for each in text.split(",")})
    except ValueError:
        parser.error(f"{option} {text!r}: whole numbers, separated by commas")
    if values[0] < least:
        parser.error(f"{option} {text!r}: at least {least}")
    return values


def run_bench(words: Sequence[str]) -> bool:
    """Measure, show, write. It judges nothing; a cell whose run fails is named and left out."""
    options, config, cells = parse(words)
    console = wide_console()
    runs: dict[Cell, dict[int, Measured]] = {cell: {} for cell in cells}
    for turn, cell in interleave(cells, options.rounds):
        try:
            runs[cell][turn] = measure(cell, config, options.seconds)
        except HeadwayError as error:
            console.print(f"round {turn}, {cell.name}: {error}", highlight=False)
            continue
        rate = runs[cell][turn].outcome.tokens_per_s
        console.print(f"round {turn}, {cell.name}: {rate:,.0f} tokens/s", highlight=False)
    summaries = [Summary(cell, mine) for cell, mine in runs.items() if mine]
    if not summaries:
        raise HeadwayError("no run of any cell said anything")
    title = f"{config.name}: {options.seconds:g} s a run, {options.rounds} rounds"
    console.print(table(summaries, title))
    if options.plot is not None:
        draw(summaries, title, options.plot)
    if options.out is not None:
        write_rows([row_of(each, options.seconds, config) for each in summaries], options.out)
    return len(summaries) == len(cells)


def row_of(summary: Summary, seconds: float, config: RunConfig) -> Row:
    """Its values by round, and the medians of the rest."""
    figures = ("lag_mean", "ess", "learner_idle", "generator_idle", "reward")
    return make_row(
        "loop",
        summary.cell.name,
        "tokens/s",
        list(summary.rates.values()),
        config={"model": config.model.path, "samples": config.batch.samples, "seconds": seconds},
        ratios={name: [summary.median(name)] for name in figures},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry; 0: every cell was measured, 1: one was not, 2: it could not run."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_status(lambda: run_bench(words))


if __name__ == "__main__":
    raise SystemExit(main())
