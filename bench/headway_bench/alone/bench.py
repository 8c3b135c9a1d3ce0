"""`headway bench generate RECIPE` and `headway bench learn RECIPE`: one side of a recipe alone, beside its bare work.

The side that is measured is whole: processes, stream, staleness policy, rewards, pushes. The other one takes no time: a
learner that trains nothing, or generators that answer at once with completions recorded beforehand. Beside it stands
what the same machine does without a loop around it, measured in the same round: decode steps of as many sequences, or
updates of as many tokens. Weights are frozen; the recipe's file and any of its keys are given as to headway run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.cli.calibrating import rates_of
from headway.cli.running import recipe
from headway.config import RunConfig, derived
from headway.errors import ConfigError
from headway.generator.setup import set_threads
from headway.planner import Rates
from headway.serial.calibrate import Calibration
from headway_bench.alone.child import GENERATE, LEARN
from headway_bench.alone.play import Alone, play
from headway_bench.alone.recorded import Recorded
from headway_bench.harness import exit_status, make_row, rows_table, wide_console, write_rows


def running(config: RunConfig) -> float:
    """Sequences that one generator decodes at once while nobody waits for the learner."""
    generator = config.generator
    return min(generator.max_running, derived.sequences_in_flight(config) / generator.replicas)


def bare_generation(config: RunConfig, rates: Rates) -> float:
    """Tokens per second of decode steps of as many sequences, in every generator."""
    count = running(config)
    return config.generator.replicas * count / rates.decode(count)


def bare_learning(config: RunConfig, rates: Rates, alone: Alone) -> float:
    """Tokens per second of updates of as many tokens.

    Calibrated by sampled tokens and each group's prompt once.
    """
    sampled = alone.tokens + config.batch.prompts * rates.prompt_tokens
    return alone.tokens / rates.train(sampled)


def measure(side: str, config: RunConfig, seconds: float, note: Callable[[str], None]) -> tuple[Alone, float]:
    """One round: the bare work, then the side alone; and the bare work's tokens per second.

    Raises:
        HeadwayError: the recipe cannot be run, or too little was measured.
    """
    set_threads(derived.threads(config, "learner" if side == LEARN else "generator"), note)
    calibration = Calibration(config, seconds, note)
    rates = rates_of(config, calibration.run())
    recorded = Recorded.of(calibration.groups) if side == LEARN else None
    alone = play(side, config, seconds, recorded)
    return alone, bare_learning(config, rates, alone) if side == LEARN else bare_generation(config, rates)


def run_bench(side: str, words: Sequence[str]) -> bool:
    """Measure, show, write. It judges nothing: what a share is worth depends on the recipe."""
    options, config = parse(side, words)
    console = wide_console()
    rates: list[float] = []
    shares: dict[str, list[float]] = {"of the bare work": [], "idle": [], "push": []}
    for turn in range(options.rounds):
        alone, bare = measure(
            side, config, options.seconds, lambda line: console.print(line, highlight=False)
        )
        rates.append(alone.tokens_per_s)
        for name, share in zip(shares, (alone.tokens_per_s / bare, alone.idle, alone.push), strict=True):
            shares[name].append(share)
        console.print(
            f"round {turn}: {alone.tokens_per_s:,.0f} tokens/s, {alone.tokens_per_s / bare:.2f} of the bare work's, "
            f"idle {alone.idle:.1%}, push {alone.push:.1%}",
            highlight=False,
        )
    row = make_row(
        side,
        config.name,
        "tokens/s",
        rates,
        config={
            "model": config.model.path,
            "engine": config.generator.engine,
            "replicas": config.generator.replicas,
            "running": running(config),
            "prompts": config.batch.prompts,
            "samples": config.batch.samples,
            "seconds": options.seconds,
        },
        ratios=shares,
    )
    console.print(rows_table(f"{side}, {config.name}: tokens/s and shares", [row]))
    if options.out is not None:
        write_rows([row], options.out)
    return True


def parse(side: str, words: Sequence[str]) -> tuple[argparse.Namespace, RunConfig]:
    """Our own options, and the recipe that the other words say.

    Raises:
        ConfigError: there is no recipe, it is wrong, or it cannot be run on one side.
    """
    parser = argparse.ArgumentParser(
        prog=f"headway bench {side}",
        description=__doc__,
        usage=f"headway bench {side} RECIPE.toml [--section.key VALUE ...] [--seconds S] [--rounds N] [--out FILE]",
        allow_abbrev=False,
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run; a third of it warms up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON lines")
    options, others = parser.parse_known_args(words)
    if options.seconds <= 0 or options.rounds < 1:
        parser.error("--seconds must be above 0, --rounds at least 1")
    config = recipe(others)
    if config.staleness.max_lag == 0:
        message = "0 lets no side run alone: each waits for the other; use at least 1"
        raise ConfigError([("staleness.max_lag", message)])
    return options, config


def generate(arguments: Sequence[str] | None = None) -> int:
    """Entry of `headway bench generate`; 0: measured, 2: it could not run."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_status(lambda: run_bench(GENERATE, words))


def learn(arguments: Sequence[str] | None = None) -> int:
    """Entry of `headway bench learn`; 0: measured, 2: it could not run."""
    words = sys.argv[1:] if arguments is None else arguments
    return exit_status(lambda: run_bench(LEARN, words))
