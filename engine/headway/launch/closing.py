"""The last lines of a run: how it went, the lag, the ledger, what held it up, and where everything lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headway.config import RunConfig
from headway.telemetry import printable
from headway.types import LearnerStatus, StepRecord

_HELD_UP = 0.15  # idle share below which a side does not wait for the other


class Bounds:
    """The values that staleness.max_lag had while one looked on."""

    def __init__(self, config: RunConfig) -> None:
        self._seen = [config.staleness.max_lag]

    def step(self, record: StepRecord) -> None:
        """Look for changes."""
        self._seen += [int(each.value) for each in record.changes if each.key == "staleness.max_lag"]

    @property
    def now(self) -> int:
        """In force."""
        return self._seen[-1]

    def __str__(self) -> str:
        least, most = min(self._seen), max(self._seen)
        return f"bound {least}" if least == most else f"bound {least} to {most}, changed on the way"


def closing_lines(
    status: LearnerStatus, config: RunConfig, folder: Path, bounds: Bounds | None = None
) -> list[str]:
    """What a user reads when the run is over. bounds: None: the recipe's, unchanged."""
    lines = [f"{status.status} after {status.step} of {config.steps} updates{_pace(status)}"]
    if status.cause:
        lines += [
            f"cause: {printable(line)}" if not index else f"  {printable(line)}"
            for index, line in enumerate(status.cause.splitlines())
        ]
    lag = lag_words(status.lag_histogram)
    if any(status.lag_histogram):
        lag += f" (largest {status.max_lag_seen}, {bounds or Bounds(config)})"
    lines += [
        f"lag of trained tokens: {lag}",
        "tickets: " + balance(status.tickets, "issued"),
        "trajectories: " + balance(status.trajectories, "received"),
        "tokens: " + balance(status.tokens, "received"),
        "bottleneck: " + bottleneck(status, config),
        f"run folder: {folder}",
    ]
    return lines


def _pace(status: LearnerStatus) -> str:
    """How fast and how good; nothing when there was no update to say it of."""
    if not status.step or not any(status.lag_histogram):
        return ""
    return (
        f" in {status.wall_s:.1f} s: reward of the last 10 {status.reward_last_10:.3f}, "
        f"{status.samples_per_s:,.1f} samples/s, {status.tokens_per_s:,.0f} tokens/s"
    )


def lag_words(histogram: list[int]) -> str:
    """ "0: 62 %, 1: 38 %": shares of the trained tokens by lag."""
    total = sum(histogram)
    if not total:
        return "nothing was trained"
    return ", ".join(f"{lag}: {100 * count / total:.0f} %" for lag, count in enumerate(histogram) if count)


def balance(counts: Mapping[str, int], opened: str) -> str:
    """One line of the ledger, opened = trained + dropped (by reason) + what is left.

    Says so when it is off.
    """
    if not counts:
        return "none"
    reasons = {
        name.removeprefix("dropped."): num for name, num in counts.items() if name.startswith("dropped.")
    }
    parts = [name for name in ("trained", "masked", "dropped", "in_flight", "buffered") if name in counts]
    words: list[str] = []
    for name in parts:
        detail = ", ".join(f"{reason} {num:,}" for reason, num in reasons.items() if num)
        words.append(
            f"{counts[name]:,} {name.replace('_', ' ')}"
            + (f" ({detail})" if name == "dropped" and detail else "")
        )
    line = f"{counts.get(opened, 0):,} {opened} = " + " + ".join(words)
    for name in ("failed", "lost_unsent"):
        if counts.get(name):
            line += f"; {counts[name]:,} {name.replace('_', ' ')}"
    missing = counts.get(opened, 0) - sum(counts[name] for name in parts)
    return line + (f"  [does not balance: {missing:+,}]" if missing else "")


def bottleneck(status: LearnerStatus, config: RunConfig) -> str:
    """Which side waited for the other, and what would help."""
    learner, generator = status.learner.shares(), status.generator.shares()
    if status.learner.total == 0.0:
        return "unknown: the run ended before its first update"
    if learner.idle >= max(_HELD_UP, generator.idle):
        return (
            f"generation-bound: the learner idled {learner.idle:.0%}; add a generator "
            "(generator.replicas), give "
            "generators more threads, or shorten completions"
        )
    if generator.idle >= _HELD_UP:
        more = " or raise max_lag so that they can run further ahead" if config.staleness.max_lag < 2 else ""
        return (
            f"training-bound: the generators idled {generator.idle:.0%}; give the learner more threads, "
            "or cut its "
            f"work (batch.share_prefix, tokens_per_row){more}"
        )
    if learner.push + generator.push >= 2 * _HELD_UP:
        return (
            f"pushes: they took {learner.push:.0%} of the learner's and {generator.push:.0%} of the "
            "generators' time"
        )
    return f"balanced: the learner idled {learner.idle:.0%}, the generators {generator.idle:.0%}"
