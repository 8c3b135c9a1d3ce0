"""`headway calibrate`: measurements of this machine as the file that `headway plan` reads."""

from __future__ import annotations

import math
import platform
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
import typer

from headway.config import RunConfig
from headway.errors import HeadwayError
from headway.planner import Curve, Rates, constant, proportional
from headway.serial.calibrate import Calibration, Measurements
from headway.tune.looped import looped

PACKAGES = ("torch", "transformers", "numpy")
POINTS = 8  # of a curve at most


def calibrate(config: RunConfig, out: Path, seconds: float, loop_s: float = 0.0) -> None:
    """Measure, write the file and say what is in it.

    Args:
        seconds: for the parts alone; loop_s: for short runs of the recipe, 0: none.

    Raises:
        HeadwayError: the recipe cannot be run, or nothing could be measured.
    """
    rates = rates_of(config, Calibration(config, seconds, typer.echo).run())
    if loop_s:
        rates = looped(rates, config, loop_s, typer.echo)
    rates.write(out)
    for line in describe(rates):
        typer.echo(line)
    typer.echo(f"wrote {out}")


def rates_of(config: RunConfig, measured: Measurements) -> Rates:
    """The curves through what was measured.

    Raises:
        HeadwayError: too little was measured for a curve.
    """
    if not (measured.decode or measured.ends) or not measured.train:
        raise HeadwayError("no decode step or no update was measured; do completions end after one token?")
    decode = decode_with_ends(measured)
    flat = measured.num_flat / len(measured.lengths)
    return Rates(
        hardware=f"{platform.node()}, {platform.machine()}",
        model=config.model.path,
        decode=decode,
        prefill=prefill_curve(measured.prefill, decode, config.batch.samples, measured),
        train=line_through(measured.train),
        groups=measured.lengths,
        publish=proportional(measured.push_bytes, measured.publish_s),
        apply=proportional(measured.push_bytes, measured.apply_s),
        push_bytes=measured.push_bytes,
        reward=measured.reward or [0.0],
        prompt_tokens=statistics.fmean(measured.prompt_tokens),
        zero_variance=min(
            flat, 0.95
        ),  # a calibration without any group that trains would plan a run without end
        drift=drift_of(measured.ess),
        context=context_of(measured.by_context),
        versions={name: metadata.version(name) for name in PACKAGES},
    )


def decode_with_ends(measured: Measurements) -> Curve:
    """Seconds of a decode step, to which every sequence brings its share of what its end costs: decoding its text,
    handing it to a reward worker and on."""
    by_running = measured.decode
    if not by_running:  # completions of two tokens: all of them end at once
        by_running = defaultdict[int, list[float]](list)
        for running, _, seconds in measured.ends:
            by_running[running].append(seconds)
        return decode_curve(by_running)
    plain = decode_curve(by_running)
    beyond_s = sum(seconds - plain(running) for running, _, seconds in measured.ends)
    num_ended = sum(ended for _, ended, _ in measured.ends)
    mean_length = statistics.fmean(length for group in measured.lengths for length in group)
    per_token = max(0.0, beyond_s / max(1, num_ended)) / mean_length
    return Curve([(count, seconds + per_token * count) for count, seconds in plain.points])


def decode_curve(by_running: Mapping[int, Sequence[float]]) -> Curve:
    """Medians of neighbouring counts, so that no point rests on a single step; never falling."""
    counts = sorted(by_running)
    per_point = -(-len(counts) // POINTS)
    points: list[tuple[float, float]] = []
    for start in range(0, len(counts), per_point):
        mine = counts[start : start + per_point]
        seconds = statistics.median(value for count in mine for value in by_running[count])
        weight = sum(len(by_running[count]) for count in mine)
        where = sum(count * len(by_running[count]) for count in mine) / weight
        points.append((where, max(seconds, points[-1][1] if points else 0.0)))
    return Curve(points)


def prefill_curve(
    waves: Iterable[tuple[int, float]], decode: Curve, samples: int, measured: Measurements
) -> Curve:
    """Seconds beyond the decode step in the same turn, in proportion to the prompt tokens."""
    mean_prompt = statistics.fmean(measured.prompt_tokens)
    per_token = [
        max(0.0, seconds - decode(tokens / mean_prompt * samples)) / tokens for tokens, seconds in waves
    ]
    return proportional(1000, 1000 * statistics.median(per_token)) if per_token else constant(0.0)


def line_through(points: Sequence[tuple[int, float]]) -> Curve:
    """The least-squares line, not falling and not below 0; a constant when x does not vary."""
    xs, ys = [float(x) for x, _ in points], [y for _, y in points]
    low, high = min(xs), max(xs)
    if high - low < 1e-9:
        return constant(statistics.median(ys))
    slope, start = statistics.linear_regression(xs, ys)
    if start < 0:
        slope, start = sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs), 0.0
    if slope < 0:
        return constant(statistics.fmean(ys))
    return Curve([(0.0, start), (high, start + slope * high)])


def context_of(turns: Sequence[tuple[int, float, float]]) -> float:
    """Seconds that a token of a running sequence's context adds to a decode step: least squares beside the number
    of sequences; 0 where too little was measured, or no growth.

    Args:
        turns: (running sequences, tokens of context that each has, seconds).
    """
    if len(turns) < 3:
        return 0.0
    running, context, seconds = np.array(turns, np.float64).T
    columns = np.column_stack([np.ones(len(turns)), running, running * context])
    return max(0.0, float(np.linalg.lstsq(columns, seconds, rcond=None)[0][2]))


def drift_of(points: Iterable[tuple[int, float]]) -> float:
    """How much each update lowers the logarithm of the effective sample size: least squares through the origin.

    Args:
        points: (updates since the weights that sampled, effective sample size).
    """
    known = [(lag, -math.log(min(1.0, ess))) for lag, ess in points if lag and ess > 0.0]
    return sum(lag * loss for lag, loss in known) / sum(lag * lag for lag, _ in known) if known else 0.0


def describe(rates: Rates) -> list[str]:
    """A calibration for people."""
    (least, fast), (most, slow) = rates.decode.points[0], rates.decode.points[-1]
    return [
        f"decode step: {1e3 * fast:.2f} ms with {least:.0f} sequences, {1e3 * slow:.2f} ms with {most:.0f}",
        f"prefill: {1e3 * rates.prefill(1000):.1f} ms for 1,000 tokens",
        f"update: {1e3 * rates.train(0):.1f} ms, and {1e3 * (rates.train(1000) - rates.train(0)):.1f} ms "
        "for each 1,000 tokens",
        f"push of {rates.push_bytes:,} bytes: learner {1e3 * rates.publish(rates.push_bytes):.2f} ms, "
        f"generator {1e3 * rates.apply(rates.push_bytes):.2f} ms",
        f"in a run: {1e3 * rates.turn:.1f} ms of an update for messages and records, "
        f"{1e3 * rates.stage(rates.push_bytes):.1f} ms from a push to a generator; beside the other side decode steps "
        f"take {rates.decode_beside:.2f} times as long, updates {rates.train_beside:.2f}",
        f"{1e9 * rates.context:.1f} ns of a decode step for each token of context",
        f"effective sample size: {math.exp(-rates.drift):.4f} after one update of lag, "
        f"{math.exp(-8 * rates.drift):.4f} after eight",
        f"reward: {1e3 * statistics.median(rates.reward):.2f} ms a completion",
        f"{len(rates.groups)} groups: mean length {rates.mean_length:.1f} tokens, prompts {rates.prompt_tokens:.1f}, "
        f"groups without a gradient {rates.zero_variance:.0%}",
    ]
