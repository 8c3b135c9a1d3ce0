"""What a step forwards besides one token per running sequence: chunks of prompts, and of prefixes to be restored.

A prompt is forwarded once for its group. After a restart (push.mode = "resume") it is forwarded again, and then
each member's own tokens, all within the same budget per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.generate.batch import DecodeBatch, RunningGroup
from headway.generate.plan import Ints, Runs


@dataclass(frozen=True)
class Prefill:
    """One step's share.

    Attributes:
        runs: in the order of their tokens; ids, positions: int64 [N] of those tokens.
        completed: for each run, the group whose prompt it completes, else None.
    """

    runs: Runs
    ids: Ints
    positions: Ints
    completed: list[RunningGroup | None]

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.ids)


class PrefillQueue:
    """Groups whose prompt is not in the pool yet, first come first served."""

    def __init__(self) -> None:
        self._groups: list[RunningGroup] = []

    def add(self, group: RunningGroup) -> None:
        """Behind the others."""
        self._groups.append(group)

    def discard(self, group: RunningGroup) -> None:
        """Forget a group, if it is there."""
        if group in self._groups:
            self._groups.remove(group)

    def restart(self, groups: list[RunningGroup]) -> None:
        """These groups' prompts again, in this order, before any other."""
        others = [group for group in self._groups if group not in groups]
        for group in groups:
            group.prefilled = 0
        self._groups = [*groups, *others]

    def take(self, batch: DecodeBatch, budget: int, version: int) -> Prefill:
        """At most `budget` tokens: prefixes of members whose prompt is there, then prompts.

        Marks them as cached under `version`; a member whose prefix is complete is ready from the next step on.
        """
        columns: list[tuple[int, int, int, int, int]] = []
        ids: list[Ints] = []
        positions: list[Ints] = []
        completed: list[RunningGroup | None] = []
        for row in np.flatnonzero(batch.behind[: batch.size] > 0).tolist():
            size = min(budget, int(batch.behind[row]))
            if size == 0:
                break
            done, prompt = int(batch.cached[row]), int(batch.prompt_length[row])
            columns.append((size, int(batch.own_start[row]), done, int(batch.prompt_start[row]), prompt))
            ids.append(batch.tokens[row, done : done + size].astype(np.int64))
            positions.append(np.arange(prompt + done, prompt + done + size))
            completed.append(None)
            batch.restore(row, size, version)
            budget -= size
        while self._groups and budget:
            group = self._groups[0]
            done = group.prefilled
            size = min(budget, group.prompt_length - done)
            columns.append((size, group.prompt_start, done, 0, 0))
            ids.append(np.array(group.request.prompt_ids[done : done + size], np.int64))
            positions.append(np.arange(done, done + size))
            group.written[done : done + size] = version
            group.prefilled += size
            budget -= size
            completes = group.prefilled == group.prompt_length
            completed.append(group if completes else None)
            if completes:
                del self._groups[0]
        table = np.array(columns, np.int64).reshape(-1, 5)
        none = np.zeros(0, np.int64)
        return Prefill(
            Runs(*(table[:, column] for column in range(5))),
            np.concatenate([none, *ids]),
            np.concatenate([none, *positions]),
            completed,
        )
