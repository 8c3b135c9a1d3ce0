"""A run as a picture: `python -m headway_bench.plot RUN_DIR OUT.svg` (needs the extra `report`).

Reads metrics.jsonl; draws reward, lag and effective sample size, and the throughput of both sides by update.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headway.telemetry import read_records
from headway.types import StepRecord

WINDOW = 10  # updates of the running mean


def draw(records: Sequence[StepRecord], title: str, target: Path) -> None:
    """Write the picture of a run's records to `target` (svg, png or pdf by its ending)."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "headway"  # the same run gives the same file
    from matplotlib import pyplot as plt

    steps = [record.step for record in records]
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(8, 7.5), sharex=True, layout="constrained")
    rewards = [record.reward for record in records]
    top.plot(steps, rewards, ".", color="#93c5fd", label="reward of an update")
    means = [sum(rewards[max(0, i - WINDOW + 1) : i + 1]) / min(WINDOW, i + 1) for i in range(len(rewards))]
    top.plot(steps, means, color="#1d4ed8", label=f"mean of the last {WINDOW}")
    top.set(title=title, ylabel="reward")
    top.legend(loc="lower right")
    middle.plot(steps, [record.lag_mean for record in records], color="#b45309", label="mean lag (updates)")
    middle.plot(steps, [record.lag_max for record in records], ":", color="#b45309", label="largest lag")
    middle.plot(
        steps, [record.ess for record in records], color="#15803d", label="effective sample size (share)"
    )
    middle.set(ylabel="lag, ESS", ylim=(-0.05, None))
    middle.legend(loc="center right")
    bottom.plot(steps, [record.tokens_per_s for record in records], color="#15803d", label="trained tokens/s")
    bottom.plot(
        steps, [record.generated_per_s for record in records], color="#1d4ed8", label="received tokens/s"
    )
    bottom.set(ylabel="tokens/s", xlabel="update", ylim=(0, None))
    bottom.legend(loc="lower right")
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


def main(arguments: Sequence[str]) -> int:
    """Entry; returns the exit status."""
    if len(arguments) != 2:
        print("usage: python -m headway_bench.plot RUN_DIR OUT.svg", file=sys.stderr)
        return 2
    run_dir, target = Path(arguments[0]), Path(arguments[1])
    records = read_records(run_dir / "metrics.jsonl")
    if not records:
        print(f"{run_dir} has no metrics.jsonl with finished updates", file=sys.stderr)
        return 2
    draw(records, run_dir.name, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
