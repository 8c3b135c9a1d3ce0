"""When failures are too many, and when rewards say nothing: the run stops, or warns, with the first cause."""

from __future__ import annotations

import logging
from collections import deque

from headway.errors import TrainingStopped
from headway.types import DropReason, Trajectory
from headway.wire.check import suspicious_zeros

_log = logging.getLogger(__name__)

_FAILURES = (
    DropReason.GENERATION_FAILED, DropReason.REWARD_FAILED, DropReason.INVALID, DropReason.PROMPT_TOO_LONG,
    DropReason.PROMPT_EMPTY, DropReason.NO_BUDGET, DropReason.ROW_TOO_SHORT, DropReason.DEADLINE,
)  # fmt: skip
ZERO_BATCHES = 10
INVALID_WINDOW, MAX_INVALID_SHARE = 64, 0.25


class FailureWatch:
    """Counts groups that failed one after the other, and the recent trajectories that failed the checks.

    Args:
        limit: failures in a row that stop the run.

    Attributes:
        suspicious: trajectories whose log-probs look like padding.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0
        self._first = ""
        self._recent: deque[bool] = deque(maxlen=INVALID_WINDOW)
        self.suspicious = 0

    def judged(self, fault: str) -> None:
        """A trajectory passed the checks at ingest ("") or failed them with this fault.

        Raises:
            TrainingStopped: more than MAX_INVALID_SHARE of the last INVALID_WINDOW failed; groups may survive
                that, so it would be silent otherwise.
        """
        self._recent.append(bool(fault))
        if not fault:
            return
        self.note(fault)
        invalid = sum(self._recent)
        if len(self._recent) == INVALID_WINDOW and invalid > MAX_INVALID_SHARE * INVALID_WINDOW:
            raise TrainingStopped(
                f"{invalid} of the last {INVALID_WINDOW} trajectories failed the checks at ingest; the first failure "
                f"was: {self._first}; the last: {fault}"
            )

    def watch_zeros(self, trajectory: Trajectory) -> None:
        """Say, once, that a trajectory's log-probs look like padding; it is valid and may be trained."""
        if suspicious_zeros(trajectory):
            self.suspicious += 1
            if self.suspicious == 1:
                _log.warning(
                    "trajectory %s has log-probs of exactly 0 in a row: padding looks like this (further ones are "
                    "only counted)", trajectory.trajectory_id,
                )  # fmt: skip

    def note(self, detail: str) -> None:
        """Remember the first failure's text."""
        self._first = self._first or detail

    def finished(self) -> None:
        """A group can be trained."""
        self._in_a_row = 0

    def ended(self, reason: DropReason) -> None:
        """A group ended as dropped; reasons that are no failure do not count.

        Raises:
            TrainingStopped: the limit is reached; names the first failure.
        """
        if reason not in _FAILURES:
            return
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            raise TrainingStopped(
                f"the last {self._limit} groups all failed, the last as {reason}; the first failure was: {self._first}"
            )


class RewardWatch:
    """Notices a reward that is 0 for many batches: a broken reward function looks like a hard task."""

    def __init__(self) -> None:
        self._zero_batches = 0

    def observe(self, reward: float, reward_std: float) -> str:
        """A warning once every ZERO_BATCHES batches in a row whose rewards are all 0, else ""."""
        self._zero_batches = self._zero_batches + 1 if reward == 0.0 and reward_std == 0.0 else 0
        if self._zero_batches and self._zero_batches % ZERO_BATCHES == 0:
            return (
                f"every reward of the last {self._zero_batches} batches is 0: look at a completion, and at what the "
                "environment expects"
            )
        return ""
