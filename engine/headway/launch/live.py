"""The live view of a terminal.

Reward, lag, queue, tokens per second and idle shares of both sides, drops, ledger.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headway.config import RunConfig
from headway.launch.closing import Bounds, balance, closing_lines, lag_words
from headway.telemetry import printable
from headway.types import LearnerStatus, StepRecord, TimeSplit

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60


class LiveView:
    """Redraws one panel; notes scroll by above it. rich draws on a thread of its own, four times a second."""

    def __init__(self, config: RunConfig, folder: Path, console: Console | None = None) -> None:
        self._config = config
        self._folder = folder
        self._bounds = Bounds(config)
        self._rewards: deque[float] = deque(maxlen=_WIDTH)
        self._console = console or Console()
        self._live = Live(Text("starting ..."), console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def step(self, record: StepRecord) -> None:
        """Redraws."""
        self._bounds.step(record)
        self._rewards.append(record.reward)
        self._live.update(self._panel(record))

    def note(self, text: str) -> None:
        """Prints the note above the panel."""
        self._console.print(Text(f"note: {printable(text)}", style="yellow"))

    def finish(self, status: LearnerStatus) -> None:
        """Leaves the last panel standing and prints how the run ended below it."""
        self._live.stop()
        for line in closing_lines(status, self._config, self._folder, self._bounds):
            self._console.print(Text(line))

    def _panel(self, record: StepRecord) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        for name, value in self._rows(record):
            grid.add_row(name, Text(value))
        minutes, seconds = divmod(int(record.elapsed_s), 60)
        title = f"{self._config.name}  step {record.step}/{self._config.steps}  {minutes}:{seconds:02d}"
        return Panel(Group(grid), title=Text(title), expand=False)

    def _rows(self, record: StepRecord) -> list[tuple[str, str]]:
        dropped = ", ".join(f"{reason} {count}" for reason, count in record.dropped.items() if count)
        return [
            ("reward", f"{record.reward:.3f}  {sparkline(self._rewards)}"),
            ("lag", f"mean {record.lag_mean:.2f}  ({lag_words(record.lag_histogram)})  bound "
                    f"{self._bounds.now}  ess {record.ess:.2f}"),
            ("queue", (f"{record.in_flight} in flight, {record.buffered} buffered, waited "
            f"{record.queue_s:.2f} s")),
            ("tokens/s", f"trained {record.tokens_per_s:,.0f}, generated {record.generated_per_s:,.0f}"),
            ("learner", split_words(record.learner, "training")),
            ("generators", f"{record.generators} x " + split_words(record.generator, "decoding")),
            ("push", f"{record.push_s * 1e3:.0f} ms, {record.push_bytes / 2**20:.1f} MiB, "
                     f"{record.changed_share:.1%} changed"),
            ("loss", f"{record.loss:.4f}  grad norm {record.grad_norm:.3f}  lr {record.lr:.2e}  entropy "
                     f"{record.entropy:.3f}"),
            ("drops", dropped or "none"),
            ("tickets", balance(record.tickets, "issued")),
        ]  # fmt: skip


def sparkline(values: deque[float] | list[float]) -> str:
    """One bar per value between the smallest and the largest; "·" where a value is not finite."""
    finite = [value for value in values if value - value == 0.0]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low
    return "".join(
        "·" if value - value != 0.0 else _BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0]
        for value in values
    )


def split_words(split: TimeSplit, work: str) -> str:
    """A time split as shares."""
    shares = split.shares()
    return (
        f"{work} {shares.work:.0%}, push {shares.push:.0%}, idle {shares.idle:.0%}, other {shares.other:.0%}"
    )
