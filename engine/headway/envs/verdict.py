"""What a reward pool answers: rewards, failures with their reasons, and counts of both."""

from __future__ import annotations

import enum
from collections import deque

import msgspec

from headway.errors import EnvironmentFailure

MIN_WINDOW = 50


class FailureReason(enum.StrEnum):
    """Why a completion has no reward."""

    TIMEOUT = "timeout"  # ran past the deadline; its worker was killed
    CRASH = "crash"  # its worker died under it
    RAISED = "raised"  # the reward function raised
    BAD_VALUE = "bad value"  # the reward function returned no finite number


class RewardResult(msgspec.Struct, frozen=True):
    """The verdicts on one job.

    Attributes:
        job_id: as submitted.
        rewards: one per completion; None where it failed.
        errors: one per completion: "" where it did not fail, else "<FailureReason>: <detail>".
    """

    job_id: int
    rewards: list[float | None]
    errors: list[str]


class RewardCounters(msgspec.Struct):
    """Counts over the life of a pool.

    Attributes:
        scored: completions with a reward.
        failed: completions without one, by reason.
        restarts: workers replaced.
        zero_streak: rewards of exactly 0 since the last other one; a long one is suspicious.
    """

    scored: int
    failed: dict[FailureReason, int]
    restarts: int = 0
    zero_streak: int = 0


class FailureWatch:
    """Counts verdicts, and stops a run whose rewards mostly fail.

    Args:
        max_failure_share: of the last `window` completions.
        window: how many of the last completions are looked at; nothing is judged before there are MIN_WINDOW.
    """

    def __init__(self, max_failure_share: float, window: int) -> None:
        if not 0 <= max_failure_share <= 1 or window < MIN_WINDOW:
            raise EnvironmentFailure(
                f"max_failure_share: got {max_failure_share}, expected 0 to 1; window: got {window}, "
                f"expected at least {MIN_WINDOW}"
            )
        self.counters = RewardCounters(scored=0, failed=dict.fromkeys(FailureReason, 0))
        self._max_share = max_failure_share
        self._recent: deque[bool] = deque(maxlen=window)
        self._recent_failed = 0
        self._first_error = ""

    def scored(self, reward: float) -> None:
        """Counts a reward."""
        self.counters.scored += 1
        self.counters.zero_streak = self.counters.zero_streak + 1 if reward == 0 else 0
        self._remember(failed=False)

    def failed(self, reason: FailureReason, error: str) -> None:
        """Counts a failure; the first one's text is kept for the message that stops the run."""
        self.counters.failed[reason] += 1
        self._first_error = self._first_error or error
        self._remember(failed=True)

    def check(self) -> None:
        """Raises once too many of the recent completions have failed.

        Raises:
            EnvironmentFailure: the share exceeds max_failure_share; carries the first error.
        """
        num_recent = len(self._recent)
        if num_recent < MIN_WINDOW or self._recent_failed <= self._max_share * num_recent:
            return
        counts = ", ".join(f"{count} {reason}" for reason, count in self.counters.failed.items() if count)
        raise EnvironmentFailure(
            f"{self._recent_failed} of the last {num_recent} rewards failed, more than the allowed share of "
            f"{self._max_share} ({counts}); the first error: {self._first_error}"
        )

    def _remember(self, *, failed: bool) -> None:
        if len(self._recent) == self._recent.maxlen:
            self._recent_failed -= self._recent[0]
        self._recent.append(failed)
        self._recent_failed += failed
