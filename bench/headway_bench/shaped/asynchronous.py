"""`headway bench async`: tokens per second of asynchronous runs over the engine's own synchronous mode.

Shaped like work on accelerators: long-tailed lengths (log-normal, p99/mean about 6, cut at --longest times the mean as
by max_new_tokens), decode steps whose length hardly depends on how many sequences run, and an update that takes half of
the time in which a synchronous round is generated.
Equal resources; every run has the same lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from headway.planner import Curve, Scenario, constant, scenario_of, simulate
from headway_bench.harness import interleave, make_row, quantiles, ratios_by_round, wide_console, write_rows
from headway_bench.shaped.play import PROMPT_TOKENS, Measured, config_of, play, recipe
from headway_bench.shaped.shape import Shape

MEAN = 20  # tokens
MOST_RUNNING = 1024
DECODE = Curve(
    [(1, 0.040), (MOST_RUNNING, 0.066)]
)  # more than the tiny model's own work for so many sequences
SIGMA = 0.97  # of log-normal lengths whose 99th percentile is six times their mean
AIM = 2.5
SYNCHRONOUS = "synchronous"


@dataclass(frozen=True)
class Contestant:
    """A setting of the staleness section; max_lag 0 is the synchronous loop."""

    policy: str
    max_lag: int
    overtaking: int = 0  # steps' worth of window; 0: as by default

    @property
    def name(self) -> str:
        """For the table."""
        if not self.max_lag:
            return SYNCHRONOUS
        window = f", W = 1 + {self.overtaking} P" if self.overtaking else ""
        return f"{self.policy}, max_lag {self.max_lag}{window}"

    def sections(self, prompts: int) -> dict[str, Any]:
        """Of the recipe."""
        window = 1 + self.overtaking * prompts if self.overtaking else 0
        return {"staleness": {"policy": self.policy, "max_lag": self.max_lag, "window": window}}


CONTESTANTS = (
    Contestant("window", 0),
    Contestant("window", 2),
    Contestant("window", 2, overtaking=1),
    Contestant("window", 4),
    Contestant("wait", 2),
    Contestant("capacity", 2),
    Contestant("drop", 2),
)
JUDGED = Contestant("window", 2)  # the default settings


@dataclass(frozen=True)
class Setup:
    """P groups of G members per update, so many updates, the first ones to warm up."""

    prompts: int
    samples: int
    steps: int
    warmup: int
    longest: int = 8  # completion, in means

    def recipe(self, shape: Shape, contestant: Contestant) -> dict[str, Any]:
        """What a contestant runs."""
        return recipe(
            shape,
            steps=self.steps,
            batch={"prompts": self.prompts, "samples": self.samples},
            generator={"max_running": MOST_RUNNING},
            **contestant.sections(self.prompts),
        )

    def scenario(self, shape: Shape, contestant: Contestant, seed: int) -> Scenario:
        """The same for the planner."""
        rates = shape.rates(seed, self.samples, (self.steps + 16) * self.prompts, PROMPT_TOKENS)
        config = config_of(self.recipe(shape, contestant))
        return scenario_of(config, rates, warmup=self.warmup, in_order=True, beside=False)

    def shape(self) -> Shape:
        """Updates take half of a synchronous round's generation."""
        base = Shape(
            decode=DECODE,
            train=constant(0.0),
            mean=MEAN,
            sigma=SIGMA,
            longest=self.longest * MEAN,
        )
        alone = simulate(replace(self.scenario(base, CONTESTANTS[0], 0), warmup=0))
        return msgspec.structs.replace(base, train=constant(alone.wall_s / alone.steps / 2))


def length_line(setup: Setup, shape: Shape) -> str:
    """What the drawn lengths are like, cut as they are."""
    num_tickets = setup.steps * setup.prompts
    lengths = sorted(
        shape.length(0, ticket, member) for ticket in range(num_tickets) for member in range(setup.samples)
    )
    mean = sum(lengths) / len(lengths)
    p99 = lengths[int(0.99 * (len(lengths) - 1))]
    return f"mean {mean:.1f} tokens, p99/mean {p99 / mean:.1f}, longest/mean {lengths[-1] / mean:.1f}"


def table(setup: Setup, shape: Shape, results: dict[Contestant, dict[int, Measured]]) -> Table:
    """Per contestant: tokens/s, its ratio over the synchronous run as measured and as planned, lag, idle shares."""
    base = simulate(setup.scenario(shape, CONTESTANTS[0], 0))
    synchronous = {turn: each.tokens_per_s for turn, each in results[CONTESTANTS[0]].items()}
    title = (
        f"{setup.prompts} x {setup.samples}, an update takes {shape.train(0):.2f} s; lengths of the first round: "
        f"{length_line(setup, shape)}"
    )
    shown = Table(title=title, title_justify="left")
    for column in (
        "run",
        "tokens/s",
        "over synchronous",
        "planned",
        "mean lag",
        "learner idle",
        "generator idle",
    ):
        shown.add_column(column, justify="left" if column == "run" else "right")
    for contestant, by_turn in results.items():
        rates = {turn: each.tokens_per_s for turn, each in by_turn.items()}
        planned = simulate(setup.scenario(shape, contestant, 0)).tokens_per_s / base.tokens_per_s
        real = list(by_turn.values())
        shown.add_row(
            contestant.name,
            quantiles(list(rates.values())).format(0),
            quantiles(ratios_by_round(rates, synchronous)).format(2),
            f"{planned:.2f}",
            f"{quantiles([each.lag_mean for each in real]).p50:.2f}",
            f"{quantiles([each.learner_idle for each in real]).p50:.0%}",
            f"{quantiles([each.generator_idle for each in real]).p50:.0%}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry. Returns 1 when the default settings miss the aim."""
    parser = argparse.ArgumentParser(prog="headway bench async", description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--longest", type=int, default=8, help="completion, in means")
    parser.add_argument("--steps", type=int, default=16, help="updates of a run")
    parser.add_argument("--warmup", type=int, default=4, help="of them, first ones that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", default="", help="contestants whose name contains this, and the synchronous one"
    )
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON lines")
    options = parser.parse_args(arguments)
    if not 0 < options.warmup < options.steps:
        parser.error(f"--warmup must be within 1 and {options.steps - 1}")
    console = wide_console()
    setup = Setup(options.prompts, options.samples, options.steps, options.warmup, options.longest)
    shape = setup.shape()
    chosen = [each for each in CONTESTANTS if each == CONTESTANTS[0] or options.only in each.name]
    results: dict[Contestant, dict[int, Measured]] = {each: {} for each in chosen}
    for turn, contestant in interleave(chosen, options.rounds):
        real = play(shape, setup.recipe(shape, contestant), turn, options.warmup)
        results[contestant][turn] = real
        console.print(f"round {turn}, {contestant.name}: {real.tokens_per_s:.0f} tokens/s", highlight=False)
    console.print(table(setup, shape, results))
    synchronous = {turn: each.tokens_per_s for turn, each in results[CONTESTANTS[0]].items()}
    ratios = {
        each: ratios_by_round({turn: real.tokens_per_s for turn, real in runs.items()}, synchronous)
        for each, runs in results.items()
    }
    if options.out is not None:
        rows = [
            make_row(
                "async", each.name, "tokens/s", [real.tokens_per_s for real in results[each].values()],
                config={
                    "prompts": setup.prompts,
                    "samples": setup.samples,
                    "longest": setup.longest,
                    "update_s": shape.train(0),
                },
                ratios={"over synchronous": ratios[each]},
            )
            for each in chosen
        ]  # fmt: skip
        write_rows(rows, options.out)
    if JUDGED not in ratios:
        console.print(f"{JUDGED.name} did not run, so the aim of {AIM} is not judged", highlight=False)
        return 0
    return 0 if quantiles(ratios[JUDGED]).p50 >= AIM else 1


if __name__ == "__main__":
    raise SystemExit(main())
