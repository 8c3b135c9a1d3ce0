"""What a run's loop adds to a calibration of its parts, from two short real runs of the recipe.

Alone and on one thread, a decode step and an update take what they take. In a run, turns of a generator carry
messages, the learner keeps records, pushes cross a channel, and both sides share the machine. All of that is in a run's
rows and in the timeline of its processes, beside how much was done. A synchronous run, in which one side waits for the
other, shows what its processes take for themselves; the recipe as it is, how much more they take beside each other.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.config import RunConfig
from headway.engine import HEADWAY
from headway.errors import RunFailed
from headway.planner import Rates, proportional
from headway.report.processes import Process, ProcessReader
from headway.tune.outcome import WARM_UP, after_warm_up, endless, rows_of, share_of
from headway.types import StepRecord


@dataclass(frozen=True)
class Looped:
    """A run after its warm-up.

    Attributes:
        rows: of updates that follow each other, the first only as a beginning.
        turns, sampled: decode steps of the generators, and the tokens of them.
        work_s, other_s: what the generators spent on these, and between them on messages.
    """

    rows: list[StepRecord]
    turns: float
    sampled: float
    work_s: float
    other_s: float

    def decode_factor(self, rates: Rates) -> float:
        """Their work over what a plan says of it."""
        issued = self.rows[-1].tickets["issued"] - self.rows[0].tickets["issued"]
        planned_s = self.turns * rates.decode(self.sampled / self.turns)
        return self.work_s / (planned_s + rates.prefill(issued * rates.prompt_tokens))

    def train_factor(self, rates: Rates) -> float:
        """The learner's updates over what a plan says of them."""
        rows = self.rows[1:]
        planned_s = sum(rates.train(row.num_tokens + row.num_groups * rates.prompt_tokens) for row in rows)
        return sum(row.learner.work for row in rows) / max(1e-9, planned_s)

    def idle(self, side: str) -> float:
        """Share of its time that the learner or the mean generator idled."""
        return share_of([getattr(row, side) for row in self.rows[1:]], "idle")


def looped(
    rates: Rates,
    config: RunConfig,
    seconds: float,
    note: Callable[[str], None] = lambda line: None,
    program: Sequence[str] = HEADWAY,
) -> Rates:
    """The calibration with what two runs of so many seconds together showed of the loop.

    Args:
        rates: of the parts alone; program: as headway.Engine's.

    Raises:
        RunFailed: a run failed, or was too short to say anything.
    """
    staleness = config.staleness.model_copy(update={"max_lag": 0, "window": 0, "slots": 0})
    push = config.push.model_copy(update={"interval": 1})
    synchronous = config.model_copy(update={"staleness": staleness, "push": push})
    note(f"runs the recipe for {seconds:.0f} s, half of them synchronously")
    alone = _run(synchronous, seconds / 2, program)
    beside = _run(config, seconds / 2, program) if config.staleness.max_lag else alone
    return corrected(rates, alone, beside)


def _run(config: RunConfig, seconds: float, program: Sequence[str]) -> Looped:
    """Until so many seconds have passed, in a folder that goes, with a timeline."""
    with tempfile.TemporaryDirectory(prefix="headway-loop-") as folder:
        run_dir = Path(folder) / "run"
        data = endless(config, run_dir)
        data["telemetry"]["spans"] = True
        rows = rows_of(RunConfig.model_validate(data), seconds, program)
        processes = ProcessReader(run_dir / "spans").read()
    return seen(after_warm_up(rows, seconds * WARM_UP), processes)


def seen(rows: list[StepRecord], processes: Sequence[Process]) -> Looped:
    """The generators' slices between the first and the last of these rows.

    Raises:
        RunFailed: no generator sampled in that time.
    """
    turns = sampled = work_s = other_s = 0.0
    for process in processes:
        if process.side != "generator":
            continue
        slices, counts = process.slices, process.counts
        inside = (slices[:, 0] >= rows[0].time_s) & (slices[:, 1] <= rows[-1].time_s) & (counts[:, 1] > 0)
        turns += float(counts[inside, 0].sum())
        sampled += float(counts[inside, 1].sum())
        work_s += float(slices[inside, 2].sum())
        other_s += float(slices[inside, 5].sum())
    if not turns:
        raise RunFailed(
            "the timeline of the run shows no generator at work after the warm-up; give it more time"
        )
    return Looped(rows, turns, sampled, work_s, other_s)


def corrected(rates: Rates, alone: Looped, beside: Looped) -> Rates:
    """Rates as the processes of a run have them, and by how much each side slows the other.

    Args:
        rates: of the parts; alone: of a synchronous run; beside: of the recipe as it is.
    """
    rates = msgspec.structs.replace(
        rates,
        decode=rates.decode.scaled(alone.decode_factor(rates), alone.other_s / alone.turns),
        prefill=rates.prefill.scaled(alone.decode_factor(rates)),
        train=rates.train.scaled(alone.train_factor(rates)),
    )
    busy, works = 1.0 - beside.idle("learner"), 1.0 - beside.idle("generator")
    rows = beside.rows[1:]
    counts = (beside.rows[0].tickets, beside.rows[-1].tickets)
    issued, flat = (
        counts[1].get(name, 0) - counts[0].get(name, 0) for name in ("issued", "dropped.zero_variance")
    )
    acks = [(row.pause_s, row.ack_s - row.pause_s) for row in rows if row.ack_s > 0] or [(0.0, 0.0)]
    pause_s, acked_s = (statistics.median(each) for each in zip(*acks, strict=True))
    # Staged in the middle of a decode step, in force after it; told to the learner after the next, which stays in here.
    waits_s = 0.5 * works * (beside.work_s + beside.other_s) / beside.turns
    return msgspec.structs.replace(
        rates,
        decode_beside=1.0 + max(0.0, beside.decode_factor(rates) - 1.0) / max(busy, 0.1),
        train_beside=max(1.0, beside.train_factor(rates)),
        zero_variance=min(flat / issued, 0.95) if issued else rates.zero_variance,
        turn=statistics.fmean(row.learner.other for row in rows),
        publish=proportional(
            rates.push_bytes,
            sum(row.learner.push for row in rows) / max(1, sum(row.push_bytes > 0 for row in rows)),
        ),
        stage=proportional(rates.push_bytes, max(0.0, acked_s - waits_s)),
        apply=proportional(rates.push_bytes, pause_s),
    )
