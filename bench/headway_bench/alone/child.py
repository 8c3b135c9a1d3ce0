"""Learner and generators of a run with one idle side: headway's own command line, in which one side takes no time.

    python -m headway_bench.alone.child generate - learner|generator ...
    python -m headway_bench.alone.child learn RECORDED learner|generator ...

generate: the learner consumes batches, pushes and books them, and trains on none but the first. learn: the generators
answer every ticket at once with recorded completions; rewards are computed as ever.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway.cli import main as headway_main
from headway_bench.alone.recorded import Recorded, read_recorded

GENERATE, LEARN = "generate", "learn"


def train_nothing() -> None:
    """Every update after the first takes no time and gives the first one's statistics."""
    from headway.trainer import Trainer

    train: Callable[..., Any] = Trainer.step
    first: list[Any] = []

    def step(self: Trainer, groups: Any, number: int) -> Any:
        if not first:
            first.append(train(self, groups, number))
            return first[0]
        trajectories = [member for group in groups for member in group.trajectories]
        batch = dataclasses.replace(first[0].batch, trajectories=trajectories)
        return dataclasses.replace(first[0], batch=batch, start_check=None, warning="")

    Trainer.step = step


def hand_out_recorded(recorded: Recorded) -> None:
    """The learner's prompts are the recorded ones, over and over."""
    from headway.learner.prompts import PromptSource

    prompts = itertools.cycle(recorded.prompts)
    PromptSource.next = lambda self: next(prompts)  # pyright: ignore[reportUnknownLambdaType]
    PromptSource.exhausted = property(lambda self: False)  # pyright: ignore


def answer_recorded(recorded: Recorded) -> None:
    """A decode step finishes everything that waits."""
    from headway.generate import FinishedMember, TorchEngine
    from headway.types import VersionSpan

    answers = recorded.answers()
    waiting: list[Any] = []
    total = [0]

    def step(self: TorchEngine) -> list[FinishedMember]:
        version, now = self.version, time.time()
        assert version is not None
        finished: list[FinishedMember] = []
        for request in waiting:
            start = len(request.prompt_ids)
            for member in request.members:
                told = answers[tuple(request.prompt_ids)][member]
                total[0] += len(told.token_ids)
                finished.append(
                    FinishedMember(
                        request_id=request.request_id,
                        member=member,
                        token_ids=told.token_ids,
                        logprobs=told.logprobs,
                        spans=[VersionSpan(start, start + len(told.token_ids), version)],
                        finish_reason=told.reason,
                        started_s=now,
                        finished_s=now,
                        kept=told.kept,
                    )
                )
        waiting.clear()
        return finished

    def abort(self: TorchEngine, request_id: int) -> int:
        del self
        waiting[:] = [request for request in waiting if request.request_id != request_id]
        return 0

    TorchEngine.add = lambda self, request: waiting.append(request)
    TorchEngine.step, TorchEngine.abort = step, abort
    TorchEngine.num_waiting = property(lambda self: len(waiting))  # pyright: ignore
    TorchEngine.num_sampled = property(lambda self: total[0])  # pyright: ignore


def main(argv: Sequence[str]) -> None:
    """Take one side's work away, then be headway."""
    side, recorded, *words = argv
    if side == GENERATE and "learner" in words:
        train_nothing()
    elif side == LEARN and "learner" in words:
        hand_out_recorded(read_recorded(Path(recorded)))
    elif side == LEARN:
        answer_recorded(read_recorded(Path(recorded)))
    headway_main(words)


if __name__ == "__main__":
    main(sys.argv[1:])
