"""`headway plan`, `calibrate` and `tune`: what a recipe will do, what a machine does, what is best (docs/tuning.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import Debug, Words, check_writable_place
from headway.errors import ConfigError


def plan(
    rates: Annotated[Path, typer.Option("--rates", help="a calibration, made by headway calibrate")],
    words: Words = None,
    replicas: Annotated[int | None, typer.Option("--replicas", min=1, help="generators")] = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="learner ranks")] = 1,
    link_gbit: Annotated[
        float, typer.Option("--link-gbit", min=0.0, help="Gbit/s that pushes cross; 0: as calibrated")
    ] = 0.0,
    losses_per_hour: Annotated[
        float, typer.Option("--losses-per-hour", min=0.0, help="of each generator")
    ] = 0.0,
    restart_s: Annotated[
        float, typer.Option("--restart-s", min=0.0, help="until a lost generator is back")
    ] = 30.0,
    generator_price: Annotated[
        float, typer.Option("--generator-price", min=0.0, help="of one generator, per hour")
    ] = 0.0,
    rank_price: Annotated[
        float, typer.Option("--rank-price", min=0.0, help="of one learner rank, per hour")
    ] = 0.0,
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="learner and generators do not share one machine")
    ] = False,
    length_factor: Annotated[
        float, typer.Option("--length-factor", min=0.01, help="completions so many times as long")
    ] = 1.0,
    tail: Annotated[
        int,
        typer.Option("--tail", min=0, help="tokens of the longest hundredth of completions; 0: as they are"),
    ] = 0,
    optimise: Annotated[
        bool, typer.Option("--optimise", help="search better settings, and print them as TOML")
    ] = False,
    most_lag: Annotated[
        float | None, typer.Option("--most-lag", min=0.0, help="with --optimise: mean lag at most")
    ] = None,
    most_idle: Annotated[
        float | None,
        typer.Option(
            "--most-idle", min=0.0, max=1.0, help="with --optimise: the learner's idle share at most"
        ),
    ] = None,
    most_replicas: Annotated[
        int,
        typer.Option("--most-replicas", min=0, help="with --optimise: generators at most; 0: as they are"),
    ] = 0,
    least_ess: Annotated[
        float | None,
        typer.Option("--least-ess", min=0.0, max=1.0, help="with --optimise: effective sample size at least"),
    ] = None,
    most_ranks: Annotated[
        int,
        typer.Option("--most-ranks", min=0, help="with --optimise: learner ranks at most; 0: as they are"),
    ] = 0,
    seed: Annotated[int, typer.Option("--plan-seed", help="of lengths, latencies and losses")] = 0,
    debug: Debug = False,
) -> int:
    """What a recipe will do before it runs: throughput, idle shares, lag, time and money; no run is started."""
    from headway.cli import planning
    from headway.planner.search import Limits

    if not optimise and (
        most_lag is not None or most_idle is not None or most_replicas or most_ranks or least_ess is not None
    ):
        told = "--most-lag, --most-idle, --most-replicas, --most-ranks, --least-ess"
        raise ConfigError([(told, "are limits of --optimise; add it")])
    what = planning.WhatIf(
        replicas, ranks, link_gbit, losses_per_hour, restart_s, generator_price, rank_price, elsewhere,
        length_factor, tail,
    )  # fmt: skip
    limits = Limits(most_lag, most_idle, most_replicas, ess=least_ess)
    lines = (
        planning.optimise(words or [], rates, what, limits, seed, most_ranks)
        if optimise
        else planning.plan(words or [], rates, what, seed)
    )
    for line in lines:
        typer.echo(line)
    return 0


def calibrate(
    out: Annotated[Path, typer.Option("--out", help="file to write")],
    words: Words = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1.0, help="about as long as it may take beyond loading")
    ] = 60.0,
    debug: Debug = False,
) -> int:
    """Measure what this machine does with a recipe's model, prompts and rewards, for headway plan."""
    from headway.cli import calibrating, running
    from headway.config import threads
    from headway.generator.setup import set_threads

    check_writable_place("--out", out)
    config = running.recipe(words or [])
    set_threads(threads(config, "generator", os.cpu_count() or 1), typer.echo)
    calibrating.calibrate(config, out, seconds)
    return 0


def tune(
    words: Words = None,
    out: Annotated[
        Path, typer.Option("--out", help="folder of the study; one that is there is gone on with")
    ] = Path("tuned"),
    trials: Annotated[
        int, typer.Option("--trials", min=1, help="settings to try, earlier ones included")
    ] = 12,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1.0, help="of each run; a third of it warms up")
    ] = 30.0,
    by: Annotated[str, typer.Option("--by", help="what is best: tokens (per second) or reward")] = "tokens",
    rates: Annotated[
        Path | None, typer.Option("--rates", help="a calibration: its plan's optimum is tried early")
    ] = None,
    most_lag: Annotated[
        float | None, typer.Option("--most-lag", min=0.0, help="mean lag of a trained token at most")
    ] = None,
    most_max_lag: Annotated[int, typer.Option("--most-max-lag", min=1, help="staleness.max_lag at most")] = 8,
    most_replicas: Annotated[
        int, typer.Option("--most-replicas", min=0, help="generators at most; 0: as they are")
    ] = 0,
    debug: Debug = False,
) -> int:
    """Try settings by short real runs, near a plan's optimum where there is a calibration; keeps the best recipe."""
    from headway.cli.trying import tuned
    from headway.tune import Limits

    if by not in ("tokens", "reward"):
        raise ConfigError([("--by", f"{by!r} is unknown; choose tokens or reward")])
    limits = Limits(most_lag, most_max_lag, most_replicas)
    for line in tuned(list(words or []), out, limits, by, rates, trials, seconds):
        typer.echo(line)
    return 0
