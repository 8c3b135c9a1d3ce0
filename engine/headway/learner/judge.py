"""Which finished groups are worth a place in a batch."""

from __future__ import annotations

from collections.abc import Sequence

from headway.algo import judge_group
from headway.buffer import Group
from headway.config import RunConfig
from headway.packing import num_forwarded
from headway.types import DropReason


class GroupJudge:
    """Finds groups without a gradient, within a bound per step, and trajectories that no row can hold.

    Args:
        config: batch.tokens_per_row, algo.filter_zero_variance, algo.max_replacements.
    """

    def __init__(self, config: RunConfig) -> None:
        self._tokens_per_row = config.batch.tokens_per_row
        self._filter = config.algo.filter_zero_variance
        self._bound = round(config.algo.max_replacements * config.batch.prompts)
        self._replaced = 0
        self._kept: set[int] = set()
        self._varied: set[int] = (
            set()
        )  # judged once: thousands may wait, and somebody asks many times a second

    def state(self) -> tuple[int, list[int]]:
        """Replacements since the last step, and the flat groups that are kept."""
        return self._replaced, sorted(self._kept)

    def restore(self, replaced: int, kept: Sequence[int]) -> None:
        """Go on from `state`."""
        self._replaced, self._kept = replaced, set(kept)

    def step_done(self) -> None:
        """A batch was consumed: the bound on replacements starts anew."""
        self._replaced = 0

    def flat(self, groups: Sequence[Group]) -> list[int]:
        """Ids of the groups, in ticket order, to replace because all their rewards are equal.

        Past the bound they are kept: they train nothing, but the run goes on.
        """
        if not self._filter:
            return []
        replace: list[int] = []
        for group in groups:
            if group.ticket_id in self._varied or group.ticket_id in self._kept:
                continue
            if judge_group(rewards(group)) is not DropReason.ZERO_VARIANCE:
                self._varied.add(group.ticket_id)
                continue
            if self._replaced < self._bound:
                self._replaced += 1
                replace.append(group.ticket_id)
            else:
                self._kept.add(group.ticket_id)
        waiting = {group.ticket_id for group in groups}
        self._kept &= waiting
        self._varied &= waiting
        return replace

    def too_long(self, group: Group) -> bool:
        """Whether a member needs more tokens than a row has."""
        return any(
            t.num_tokens > self._tokens_per_row and num_forwarded(t) > self._tokens_per_row
            for t in group.trajectories
        )

    def too_long_message(self, group: Group) -> str:
        """For people."""
        longest = max(t.num_tokens for t in group.trajectories)
        return (
            f"a trajectory of {longest} tokens exceeds batch.tokens_per_row = {self._tokens_per_row}; raise it, "
            "or lower sampling.max_new_tokens"
        )


def rewards(group: Group) -> list[float]:
    """Of its trajectories."""
    return [float("nan") if t.reward is None else t.reward for t in group.trajectories]
