"""The sums over a run's records: what a status says when the learner could not write its own."""

from __future__ import annotations

from collections import deque

from headway.types import LearnerStatus, StepRecord, TimeSplit

_NOTHING = TimeSplit(0.0, 0.0, 0.0, 0.0)


class Tally:
    """Adds up records; bounded memory."""

    def __init__(self) -> None:
        self.last: StepRecord | None = None
        self._num_trajectories = 0
        self._num_tokens = 0
        self._lags: list[int] = []
        self._rewards: deque[float] = deque(maxlen=10)
        self._learner = _NOTHING
        self._generator = _NOTHING

    def add(self, record: StepRecord) -> None:
        """One optimizer step."""
        self.last = record
        self._num_trajectories += record.num_trajectories
        self._num_tokens += record.num_tokens
        self._lags += [0] * (len(record.lag_histogram) - len(self._lags))
        for lag, count in enumerate(record.lag_histogram):
            self._lags[lag] += count
        self._rewards.append(record.reward)
        self._learner = _sum(self._learner, record.learner)
        self._generator = _sum(self._generator, record.generator)

    def status(self, status: str, cause: str) -> LearnerStatus:
        """The status of a run that ended here."""
        last = self.last
        wall_s = last.elapsed_s if last else 0.0
        return LearnerStatus(
            status=status,
            cause=cause,
            step=last.step if last else 0,
            wall_s=wall_s,
            samples_per_s=self._num_trajectories / wall_s if wall_s else 0.0,
            tokens_per_s=self._num_tokens / wall_s if wall_s else 0.0,
            reward_last_10=sum(self._rewards) / len(self._rewards) if self._rewards else 0.0,
            max_lag_seen=max((lag for lag, count in enumerate(self._lags) if count), default=0),
            lag_histogram=self._lags,
            learner=self._learner,
            generator=self._generator,
            tickets=last.tickets if last else {},
            trajectories=last.trajectories if last else {},
            tokens=last.tokens if last else {},
            dropped=last.dropped if last else {},
        )


def _sum(left: TimeSplit, right: TimeSplit) -> TimeSplit:
    return TimeSplit(
        left.work + right.work, left.push + right.push, left.idle + right.idle, left.other + right.other
    )
