"""`headway tune`: the lines that it prints, and the files that it leaves."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

from headway.cli.planning import SEARCH_STEPS, WhatIf
from headway.cli.running import recipe
from headway.config import RunConfig, save
from headway.errors import HeadwayError
from headway.planner import read_rates
from headway.planner.search import Limits as PlanLimits
from headway.planner.search import Search
from headway.tune import Limits, Study, draw
from headway.tune.picture import require_plotly
from headway.tune.space import with_values
from headway.tune.study import By


def tuned(
    words: list[str],
    folder: Path,
    limits: Limits,
    by: By,
    rates: Path | None,
    num_trials: int,
    seconds: float,
) -> Iterator[str]:
    """Run a study; its best recipe and its picture are in the folder at the end.

    Raises:
        ConfigError: the recipe, the calibration or the folder cannot be used.
        UnsupportedOption: Optuna or Plotly is missing. HeadwayError: no trial kept the limits.
    """
    require_plotly()
    config = recipe(words)
    study = Study.open(config, limits, folder, by, seconds)
    known = len(study.trials())
    if known:
        yield f"{folder}: {known} settings were tried before"
    if rates is not None:
        planned = _optimum(config, rates, limits)
        yield f"the plan's optimum: {', '.join(f'{key} {value}' for key, value in planned.items())}"
        study.suggest(planned)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    for number in range(known + 1, num_trials + 1):
        study.run(number, said.put)
        while not said.empty():
            yield said.get()
    best = study.best()
    draw(study.trials(), best, config.name, folder / "tune.html")
    yield f"picture: {folder / 'tune.html'}"
    if best is None or best.outcome is None:
        raise HeadwayError(
            "no setting was measured and kept the limits: widen them, or give another --out and trials more --seconds"
        )
    save(with_values(config, best.values), folder / "recipe.toml")
    yield f"best: trial {best.number}, {best.outcome.tokens_per_s:,.0f} tokens/s, mean lag {best.outcome.lag_mean:.2f}"
    for key, value in best.values.items():
        section, name = key.split(".")
        before = getattr(getattr(config, section), name)
        yield f"  {key} = {value}" + ("" if value == before else f"  (was {before})")
    yield f"recipe: {folder / 'recipe.toml'}"


def _optimum(config: RunConfig, path: Path, limits: Limits) -> dict[str, int]:
    rates = read_rates(path)
    most = PlanLimits(lag=limits.lag, replicas=max(limits.replicas, config.generator.replicas))
    found = Search(config, lambda changed: WhatIf().scenario(changed, rates, SEARCH_STEPS), most).run()
    return {change.key: change.after for change in found.changes}
