"""Learner and generators of a shaped run: headway's own command line, in which work takes as long as the shape says.

    python -m headway_bench.shaped.child SHAPE_FILE learner|generator ...

What really has to be computed (a tiny model) is computed first; the rest of the time is slept. Work that takes longer
than its shape would falsify the run, so it is counted and said in the log at the end.
"""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.cli import main as headway_main
from headway_bench.shaped.shape import Shape, ShapeFile, read_shape

_log = logging.getLogger(__name__)


MOST_BEHIND_S = 0.1  # what a host that is late may catch up


class Pace:
    """Stretches pieces of work to a duration.

    Attributes:
        late_s, total_s: time beyond the durations asked for, and all of them together.
        busy: more work stands in the queue, so the next piece begins where this one ends, as on a device whose host
            works ahead; a host that is late for one piece may catch up with the next.
    """

    def __init__(self) -> None:
        self.late_s = self.total_s = 0.0
        self.busy = False
        self._ended_s = 0.0

    def stretch(self, began_s: float, seconds: float) -> None:
        """Sleep until `seconds` after `began_s`, or after the end of the work before it."""
        if self.busy:
            began_s = max(min(self._ended_s, began_s), began_s - MOST_BEHIND_S)
        self._ended_s = began_s + seconds
        self.total_s += seconds
        left = self._ended_s - time.perf_counter()
        if left > 0:
            time.sleep(left)
        else:
            self.late_s -= left

    def report(self) -> None:
        """One line in the process's log."""
        if self.total_s:
            _log.info("shaped: %.1f s of work, %.1f s late", self.total_s, self.late_s)


def shape_lengths(file: ShapeFile) -> None:
    """Members stop at the length that the shape draws for them."""
    from headway.generate.batch import DecodeBatch
    from headway.generate.stops import StopTable

    lengths: dict[tuple[int, int], int] = {}

    def stopped(self: StopTable, batch: DecodeBatch, rows: Any, last: Any) -> Any:
        del self, last
        mine: list[bool] = []
        for ticket_id, member, count in zip(
            batch.group[rows].tolist(), batch.member[rows].tolist(), batch.count[rows].tolist(), strict=True
        ):
            key = (ticket_id, member)
            if key not in lengths:
                lengths[key] = file.shape.length(file.seed, ticket_id, member)
            mine.append(count >= lengths[key])
        return np.array(mine, np.bool_)

    StopTable.stopped = stopped


def shape_generator(shape: Shape, pace: Pace) -> None:
    """Decode steps and applies take their time."""
    from headway.generate.engine import TorchEngine
    from headway.weights.stager_thread import StagerThread

    step, commit = TorchEngine.step, StagerThread.commit

    def slow_step(self: TorchEngine) -> Any:
        began_s = time.perf_counter()
        finished = step(self)
        running = self.num_running + len(finished)
        if running:
            pace.stretch(began_s, shape.decode(running))
        pace.busy = self.num_running + self.num_waiting > 0
        return finished

    def slow_commit(self: StagerThread) -> Any:
        began_s = time.perf_counter()
        version = commit(self)
        if version is not None:
            pace.stretch(began_s, shape.apply)
        return version

    TorchEngine.step, StagerThread.commit = slow_step, slow_commit


def shape_learner(shape: Shape, pace: Pace) -> None:
    """Updates and publishing take their time."""
    from headway.learner.publisher import Publisher
    from headway.trainer import Trainer

    train: Callable[..., Any] = Trainer.step
    publish: Callable[..., Any] = Publisher.publish

    def slow_step(self: Trainer, groups: Any, step: int) -> Any:
        began_s = time.perf_counter()
        stats = train(self, groups, step)
        # As the planner counts: what a tiny vocabulary lets completions share is no property of the shape.
        num_tokens = sum(group.num_tokens + len(group.ticket.prompt_ids) for group in groups)
        pace.stretch(began_s, shape.train(num_tokens))
        return stats

    def slow_publish(self: Publisher, *arguments: Any, **named: Any) -> Any:
        pace.stretch(time.perf_counter(), shape.publish)  # before: nobody has the weights until it is over
        return publish(self, *arguments, **named)

    Trainer.step, Publisher.publish = slow_step, slow_publish


def main(argv: Sequence[str]) -> None:
    """Take on the shape, then be headway."""
    file, words = read_shape(Path(argv[0])), list(argv[1:])
    pace = Pace()
    atexit.register(pace.report)
    if "generator" in words:
        shape_lengths(file)
        shape_generator(file.shape, pace)
    elif "learner" in words:
        shape_learner(file.shape, pace)
    headway_main(words)


if __name__ == "__main__":
    main(sys.argv[1:])
