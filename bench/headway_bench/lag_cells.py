"""Cells of the bench of staleness: read back, judged against lag 0, shown as a table and drawn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Table

from headway_bench.harness import quantiles

DEFAULT = "cispo"
AIMS = {4: 0.95, 8: 0.90}  # of the reward at lag 0, for the default objective
WINDOW = 50  # versions whose samples make up a cell's reward


class Key(msgspec.Struct, frozen=True):
    """What a cell was asked for.

    Attributes:
        objective: of [algo], or "uncorrected". lag: of every batch; steps: updates whose outcome is asked for.
        updates: of the run; code: commit and recipe.
    """

    objective: str
    lag: int
    seed: int
    steps: int
    updates: int
    code: str


class Cell(Key, frozen=True):
    """One run.

    Attributes:
        rewards: of each update; seconds: since the start, at each. ess: mean over the updates.
        reward: of the weights around `steps`.
    """

    rewards: list[float]
    seconds: list[float]
    ess: float
    lag_mean: float
    reward: float

    @property
    def key(self) -> Key:
        """What was asked for."""
        return Key(*(getattr(self, name) for name in Key.__struct_fields__))


def reward_at(rewards: Sequence[float], lag: int, steps: int) -> float:
    """Mean reward of what the versions [steps - WINDOW, steps) sampled: version w is trained by update w + lag + 1."""
    return statistics.fmean(rewards[max(0, steps - WINDOW) + lag : steps + lag])


def read_cells(path: Path) -> dict[Key, Cell]:
    """Cells of earlier runs; a torn last line is left out."""
    cells: dict[Key, Cell] = {}
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                cell = msgspec.json.decode(line, type=Cell)
            except msgspec.MsgspecError:
                continue
            cells[cell.key] = cell
    return cells


@dataclass(frozen=True)
class Judged:
    """The reward of one objective at one lag, over that at lag 0 of the same seed.

    Attributes:
        rewards, shares: one per seed, in order.
    """

    objective: str
    lag: int
    rewards: list[float]
    shares: list[float]
    ess: float


def judge(cells: Sequence[Cell]) -> list[Judged]:
    """By objective and lag, in that order; shares of the seeds that have a run at lag 0."""
    base = {(cell.objective, cell.seed): cell.reward for cell in cells if cell.lag == 0 and cell.reward > 0}
    found: list[Judged] = []
    for objective, lag in sorted({(cell.objective, cell.lag) for cell in cells}):
        mine = sorted((c for c in cells if (c.objective, c.lag) == (objective, lag)), key=lambda c: c.seed)
        shares = [c.reward / base[objective, c.seed] for c in mine if (objective, c.seed) in base]
        ess = statistics.fmean(c.ess for c in mine)
        found.append(Judged(objective, lag, [c.reward for c in mine], shares, ess))
    return found


def table(judged: Sequence[Judged], steps: int) -> Table:
    """One line for each objective and lag."""
    shown = Table(
        title=f"reward of the weights of updates {max(0, steps - WINDOW)} to {steps}, 64 samples each",
        title_justify="left",
    )
    for column in ("objective", "lag", "seeds", "reward", "share of lag 0", "aim", "mean ESS"):
        shown.add_column(column, justify="left" if column == "objective" else "right")
    for each in judged:
        aim = AIMS.get(each.lag) if each.objective == DEFAULT else None
        shown.add_row(
            each.objective,
            str(each.lag),
            str(len(each.rewards)),
            quantiles(each.rewards).format(3),
            quantiles(each.shares).format(3) if each.shares else "-",
            "-" if aim is None else f"{aim:.2f}",
            f"{each.ess:.3f}",
        )
    return shown


def draw(cells: Sequence[Cell], target: Path) -> None:
    """Reward against samples and against seconds: the mean over the seeds, a line per objective and lag."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "headway"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    styles = dict(zip(sorted({c.objective for c in cells}), ("-", "--", ":", "-."), strict=False))
    lags = sorted({c.lag for c in cells})
    for objective, lag in sorted({(c.objective, c.lag) for c in cells}):
        mine = [c for c in cells if (c.objective, c.lag) == (objective, lag)]
        length = min(len(c.rewards) for c in mine)
        rewards = np.mean([c.rewards[:length] for c in mine], axis=0)
        smooth = np.convolve(rewards, np.ones(WINDOW) / WINDOW, mode="valid")
        colour = plt.get_cmap("viridis")(lags.index(lag) / max(1, len(lags) - 1))
        look = {"color": colour, "linestyle": styles.get(objective, "-"), "label": f"{objective}, lag {lag}"}
        sampled_by = np.arange(WINDOW, length + 1) - lag  # updates that the weights had seen
        axes[0].plot(64 * sampled_by, smooth, **look)
        seconds = np.mean([c.seconds[:length] for c in mine], axis=0)[WINDOW - 1 :]
        axes[1].plot(seconds, smooth, **look)
    axes[0].set(xlabel="trained samples", ylabel=f"reward, mean of {WINDOW} updates")
    axes[1].set(xlabel="seconds of a serial run")
    axes[0].legend(loc="lower right", fontsize="small")
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
