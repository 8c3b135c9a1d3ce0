"""The options of `headway plan`: what differs from the recipe, and what a search must keep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RatesFile = Annotated[Path, typer.Option("--rates", help="a calibration, made by headway calibrate")]
Seed = Annotated[int, typer.Option("--plan-seed", help="of lengths, latencies and losses")]

# What if
Replicas = Annotated[int | None, typer.Option("--replicas", min=1, help="generators")]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="learner ranks")]
LinkGbit = Annotated[
    float, typer.Option("--link-gbit", min=0.0, help="Gbit/s that pushes cross; 0: as calibrated")
]
LossesPerHour = Annotated[float, typer.Option("--losses-per-hour", min=0.0, help="of each generator")]
RestartS = Annotated[float, typer.Option("--restart-s", min=0.0, help="until a lost generator is back")]
GeneratorPrice = Annotated[
    float, typer.Option("--generator-price", min=0.0, help="of one generator, per hour")
]
RankPrice = Annotated[float, typer.Option("--rank-price", min=0.0, help="of one learner rank, per hour")]
Elsewhere = Annotated[
    bool, typer.Option("--elsewhere", help="learner and generators do not share one machine")
]
LengthFactor = Annotated[
    float, typer.Option("--length-factor", min=0.01, help="completions so many times as long")
]
Tail = Annotated[
    int, typer.Option("--tail", min=0, help="tokens of the longest hundredth of completions; 0: as they are")
]

# What a search must keep
Optimise = Annotated[bool, typer.Option("--optimise", help="search better settings, and print them as TOML")]
MostLag = Annotated[
    float | None, typer.Option("--most-lag", min=0.0, help="with --optimise: mean lag at most")
]
LeastEss = Annotated[
    float | None,
    typer.Option("--least-ess", min=0.0, max=1.0, help="with --optimise: effective sample size at least"),
]
MostIdle = Annotated[
    float | None,
    typer.Option("--most-idle", min=0.0, max=1.0, help="with --optimise: the learner's idle share at most"),
]
MostReplicas = Annotated[
    int, typer.Option("--most-replicas", min=0, help="with --optimise: generators at most; 0: as they are")
]
MostRanks = Annotated[
    int, typer.Option("--most-ranks", min=0, help="with --optimise: learner ranks at most; 0: as they are")
]
