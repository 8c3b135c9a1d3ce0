"""`headway plan`, `calibrate` and `tune`: what a recipe will do, what a machine does, what is best (docs/tuning.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from headway.cli import plan_options as options
from headway.cli.options import Debug, Words, check_writable_place
from headway.errors import ConfigError


def plan(
    rates: options.RatesFile,
    words: Words = None,
    replicas: options.Replicas = None,
    ranks: options.Ranks = 1,
    link_gbit: options.LinkGbit = 0.0,
    losses_per_hour: options.LossesPerHour = 0.0,
    restart_s: options.RestartS = 30.0,
    generator_price: options.GeneratorPrice = 0.0,
    rank_price: options.RankPrice = 0.0,
    elsewhere: options.Elsewhere = False,
    length_factor: options.LengthFactor = 1.0,
    tail: options.Tail = 0,
    optimise: options.Optimise = False,
    most_lag: options.MostLag = None,
    least_ess: options.LeastEss = None,
    most_idle: options.MostIdle = None,
    most_replicas: options.MostReplicas = 0,
    most_ranks: options.MostRanks = 0,
    seed: options.Seed = 0,
    debug: Debug = False,
) -> int:
    """What a recipe will do before it runs: throughput, idle shares, lag, time and money; no run is started."""
    from headway.cli import planning
    from headway.planner.search import Limits

    limits = Limits(most_lag, most_idle, most_replicas, ess=least_ess)
    if not optimise and (limits != Limits(replicas=0) or most_ranks):
        told = "--most-lag, --least-ess, --most-idle, --most-replicas, --most-ranks"
        raise ConfigError([(told, "are limits of --optimise; add it")])
    what = planning.WhatIf(
        replicas=replicas,
        ranks=ranks,
        link_gbit=link_gbit,
        losses_per_hour=losses_per_hour,
        restart_s=restart_s,
        generator_price=generator_price,
        rank_price=rank_price,
        elsewhere=elsewhere,
        length_factor=length_factor,
        tail=tail,
    )
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
        float, typer.Option("--seconds", min=1.0, help="for the parts alone: about as long as they may take")
    ] = 60.0,
    loop: Annotated[
        float,
        typer.Option(
            "--loop",
            min=0.0,
            help="seconds of short runs that show what the parts take in a loop; 0: no runs",
        ),
    ] = 40.0,
    debug: Debug = False,
) -> int:
    """Measure what this machine does with a recipe's model, prompts and rewards, for headway plan."""
    from headway.cli import calibrating, running
    from headway.config import threads
    from headway.generator.setup import set_threads

    check_writable_place("--out", out)
    config = running.recipe(words or [])
    set_threads(threads(config, "generator", os.cpu_count() or 1), typer.echo)
    calibrating.calibrate(config, out, seconds, loop)
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
