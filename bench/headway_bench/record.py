"""`headway bench record`: what it costs to record a run, as shares of what is recorded.

A serial run of digit sorting with 1,000 samples an update makes its rows, appends them to metrics.jsonl and writes its
slices of time. What these take is summed by timing the calls that do it; the update around them is measured in the
same run. A generator's clock changes its state twice around each decode step: as many pairs are timed on a clock of
their own, which counts a decode step and more than a slice's least time in turn, so that each change ends a slice and
every slice is written. Sinks other than metrics.jsonl work in the process that started
the run, on threads of their own, and wait for nobody: they are not in these figures.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.table import Table

from headway.config import RunConfig, create_run
from headway.serial import SerialRun
from headway.telemetry import JsonlSink, SpanLog, SplitClock, spans_in
from headway.telemetry.spans import SHORT_NS
from headway_bench.harness import make_row, quantiles, ratios_by_round, wide_console, write_rows

AIM = 0.02  # of an update, and of a decode step
PAIRS = 2000
SAMPLES = 8
BETWEEN_NS = 2 * SHORT_NS  # from one decode step to the next


@dataclass
class Costs:
    """Seconds of one run.

    Attributes:
        updates: each whole; recording: what of it made and wrote its row, and the learner's slices.
        decode: of each decode step; pairs: of each pair of changes of a generator's clock.
    """

    updates: list[float] = field(default_factory=list[float])
    recording: list[float] = field(default_factory=list[float])
    decode: list[float] = field(default_factory=list[float])
    pairs: list[float] = field(default_factory=list[float])


class Stopwatch:
    """Sums the time of the calls that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any], each: list[float] | None = None) -> Callable[..., Any]:
        """The same call, timed; `each` gets every duration."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - began
                self.seconds += seconds
                if each is not None:
                    each.append(seconds)

        return timed

    def take(self) -> float:
        """The sum since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def config_of(run_dir: Path, samples: int, steps: int) -> RunConfig:
    """The recipe: so many samples an update, in groups of eight."""
    return RunConfig.model_validate({
        "steps": steps,
        "run_dir": str(run_dir),
        "model": {"path": "builtin:sort5"},
        "env": {"name": "sort", "args": {"reward": "sum7"}},  # varies from the start, so that groups are trained
        "batch": {"prompts": samples // SAMPLES, "samples": SAMPLES},
        "staleness": {"max_lag": 0},
        "checkpoint": {"interval": 0},
    })  # fmt: skip


def measure(config: RunConfig, warmup: int) -> Costs:
    """One run; the first updates do not count."""
    folder, costs, recording = create_run(config), Costs(), Stopwatch()
    sink, run = JsonlSink(folder.metrics, folder.summary), SerialRun(config, folder=folder)
    write = recording.around(sink.step)
    _wrap(run.recorder, "step", recording.around)
    _wrap(run.rollouts[0].engine, "step", lambda call: Stopwatch().around(call, costs.decode))
    try:
        with patch.object(SpanLog, "add", recording.around(SpanLog.add)):
            began = time.perf_counter()
            for record in run.steps():
                write(record)
                now = time.perf_counter()
                seconds = recording.take()
                if record.step > warmup:
                    costs.updates.append(now - began)
                    costs.recording.append(seconds)
                began = now
    finally:
        run.close()
        sink.close()
    opened = spans_in(folder.spans, "generator 0", "generator", "g0")
    decode_ns = max(BETWEEN_NS, int(1e9 * quantiles(costs.decode).p50))
    clock = SplitClock(partial(next, itertools.accumulate(itertools.cycle((decode_ns, BETWEEN_NS)))), opened)
    clock.sampled_by(lambda: 0)
    for _ in range(PAIRS):
        began = time.perf_counter()
        with clock("work"):
            pass
        costs.pairs.append(time.perf_counter() - began)
    clock.close()
    return costs


def _wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, around(getattr(owner, name)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry. Returns 1 when recording costs more than the aim."""
    parser = argparse.ArgumentParser(prog="headway bench record", description=__doc__)
    parser.add_argument("--samples", type=int, default=1000, help="an update")
    parser.add_argument("--steps", type=int, default=12, help="updates of a run")
    parser.add_argument("--warmup", type=int, default=2, help="of them, first ones that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON lines")
    options = parser.parse_args(arguments)
    if not 0 <= options.warmup < options.steps:
        parser.error(f"--warmup must be within 0 and {options.steps - 1}")
    if options.samples < SAMPLES:
        parser.error(f"--samples must be at least {SAMPLES}")
    cases: dict[str, tuple[list[float], list[float]]] = {"an update": ([], []), "a decode step": ([], [])}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            costs = measure(config_of(Path(folder) / "run", options.samples, options.steps), options.warmup)
        for case, spent, whole in (
            ("an update", costs.recording, costs.updates),
            ("a decode step", costs.pairs, costs.decode),
        ):
            cases[case][0].append(quantiles(spent).p50)
            cases[case][1].append(quantiles(whole).p50)
    shown = Table(
        title=f"{options.samples // SAMPLES * SAMPLES} samples an update, medians", title_justify="left"
    )
    for column in ("recording", "takes us", "of us", "share, %"):
        shown.add_column(column, justify="left" if column == "recording" else "right")
    rows, missed = [], False
    for case, (spent, whole) in cases.items():
        shares = ratios_by_round(dict(enumerate(spent)), dict(enumerate(whole)))
        missed = missed or quantiles(shares).p50 >= AIM
        shown.add_row(
            case,
            quantiles([1e6 * each for each in spent]).format(1),
            quantiles([1e6 * each for each in whole]).format(0),
            quantiles([100.0 * each for each in shares]).format(3),
        )
        config = {"samples": options.samples, "steps": options.steps}
        rows.append(make_row("record", case, "s", spent, config=config, ratios={"of the whole": shares}))
    wide_console().print(shown)
    if options.out is not None:
        write_rows(rows, options.out)
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
