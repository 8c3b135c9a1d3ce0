"""What a user sees of a run while it goes on.

A line per step, or nothing. The live view is in launch.live.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

from headway.config import RunConfig
from headway.launch.closing import Bounds, closing_lines
from headway.telemetry import printable
from headway.types import LearnerStatus, StepRecord


class PlainView:
    """One line per optimizer step: for logs, pipes and terminals without control sequences."""

    def __init__(self, config: RunConfig, folder: Path, out: IO[str]) -> None:
        self._config = config
        self._folder = folder
        self._out = out
        self._bounds = Bounds(config)

    def step(self, record: StepRecord) -> None:
        """Prints the step."""
        self._bounds.step(record)
        self._print(step_line(record, self._config))

    def note(self, text: str) -> None:
        """Prints the note."""
        self._print(f"note: {printable(text)}")

    def finish(self, status: LearnerStatus) -> None:
        """Prints how the run ended."""
        for line in closing_lines(status, self._config, self._folder, self._bounds):
            self._print(line)

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)


def step_line(record: StepRecord, config: RunConfig) -> str:
    """One step on one line."""
    learner, generator = record.learner.shares(), record.generator.shares()
    parts = [
        f"step {record.step}/{config.steps}",
        f"reward {record.reward:.3f}",
        f"lag {record.lag_mean:.2f} (max {record.lag_max})",
        f"ess {record.ess:.2f}",
        f"trained {record.tokens_per_s:,.0f} tok/s",
        f"generated {record.generated_per_s:,.0f} tok/s",
        f"idle learner {learner.idle:.0%} generator {generator.idle:.0%}",
        f"in flight {record.in_flight} buffered {record.buffered}",
    ]
    dropped = sum(record.dropped.values())
    if dropped:
        parts.append(f"dropped {dropped}")
    if record.skipped:
        parts.append("SKIPPED: the gradient was not finite")
    return "  ".join(parts)
