"""Rows of the run: a StepRecord for each optimizer step, a LearnerStatus at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from headway.buffer import Group
from headway.learner.desk import Desk
from headway.learner.publisher import PushStats
from headway.learner.state import RecorderState
from headway.telemetry import SplitClock
from headway.trainer import StepStats
from headway.types import (
    FinishReason,
    LearnerStatus,
    PolicyVersion,
    SettingChange,
    StepRecord,
    TimeSplit,
    Trajectory,
)


class Recorder:
    """Turns what a step did into its row, and keeps what the last row sums up.

    Args:
        desk: looked at under the caller's lock; take_changes: settings changed since the last call.
        clock: of the learner's time; now: monotonic seconds, the desk's.
        unix: wall-clock seconds, the trajectories'.
    """

    def __init__(
        self,
        desk: Desk,
        take_changes: Callable[[], list[SettingChange]],
        clock: SplitClock,
        now: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._desk = desk
        self._take_changes = take_changes
        self._clock = clock
        self._now = now
        self._unix = unix
        self._last_s = now()
        self._last_received = 0
        self._lags = np.zeros(1, np.int64)
        self._num_trajectories = self._num_tokens = 0
        self._rewards: deque[float] = deque(maxlen=10)
        self._finished_s = now()
        self._generator = self._learner_before = TimeSplit(0.0, 0.0, 0.0, 0.0)

    def state(self) -> RecorderState:
        """The sums so far, for a checkpoint."""
        return RecorderState(
            lags=self._lags.tolist(),
            num_trajectories=self._num_trajectories,
            num_tokens=self._num_tokens,
            rewards=list(self._rewards),
            learner=_sum(self._learner_before, self._clock.split()),
            generator=self._generator,
        )

    def restore(self, state: RecorderState) -> None:
        """Go on from there."""
        self._lags = np.array(state.lags, np.int64)
        self._num_trajectories, self._num_tokens = state.num_trajectories, state.num_tokens
        self._rewards.extend(state.rewards)
        self._learner_before, self._generator = state.learner, state.generator
        self._last_received = self._desk.arrivals.num_sampled

    def step(
        self,
        groups: list[Group],
        consumed: PolicyVersion,
        version: PolicyVersion,
        stats: StepStats,
        push: PushStats,
        checkpoint_s: float = 0.0,
    ) -> StepRecord:
        """The row of the step that consumed `groups` with weights `consumed` and made `version`.

        Args:
            checkpoint_s: that training has stood still for checkpoints since the last row.
        """
        now, unix, learner = self._now(), self._unix(), self._clock.lap()
        interval = max(1e-9, now - self._last_s)
        trajectories = stats.batch.trajectories
        lags = _lag_histogram(trajectories, consumed.step)
        counts, generator, acks = self._desk.gate.counts(), self._desk.generator_lap(), self._desk.ack_lap()
        received = self._desk.arrivals.num_sampled
        trained = [t.reward for t in trajectories if t.reward is not None]
        # Without the replaced groups the mean would say how the batch was filtered, not how good the policy is.
        reward = np.array(trained + self._desk.take_flat_rewards(), np.float64)
        policy = stats.policy
        record = StepRecord(
            step=version.step,
            epoch=version.epoch,
            time_s=unix,
            elapsed_s=now - (self._desk.first_ticket_s or now),
            reward=float(reward.mean()) if reward.size else 0.0,
            reward_std=float(reward.std()) if reward.size else 0.0,
            lag_mean=float(np.dot(np.arange(len(lags)), lags) / max(1, lags.sum())),
            lag_max=int(np.flatnonzero(lags)[-1]) if lags.any() else 0,
            lag_histogram=lags.tolist(),
            ess=policy.ess,
            loss=stats.loss,
            grad_norm=stats.grad_norm,
            lr=stats.lr,
            entropy=policy.entropy,
            kl_behaviour=policy.kl_behaviour,
            kl_reference=policy.kl_reference,
            clip_share=policy.clip_share,
            ratio_mean=policy.ratio_mean,
            ratio_max=policy.ratio_max,
            weight_mean=policy.weight_mean,
            rejected_share=policy.rejected_share,
            num_groups=len(groups),
            num_trajectories=len(trajectories),
            num_tokens=stats.batch.num_loss_tokens,
            num_forwarded=stats.batch.num_forwarded,
            num_rows=len(stats.batch.rows),
            completion_tokens=float(lags.sum() / max(1, len(trajectories))),
            stop_share=_share(t.finish_reason is FinishReason.STOP for t in trajectories),
            duplicate_share=_duplicate_share(groups),
            queue_s=float(np.mean([unix - t.finished_s for t in trajectories])) if trajectories else 0.0,
            tokens_per_s=int(lags.sum()) / interval,
            generated_per_s=(received - self._last_received) / interval,
            learner=learner,
            generator=generator,
            push_s=push.seconds,
            ack_s=acks.delay_s,
            pause_s=acks.pause_s,
            changed_share=push.changed_share,
            push_bytes=push.num_bytes,
            skipped=stats.skipped,
            tickets=counts.tickets,
            trajectories=counts.trajectories,
            tokens=counts.tokens,
            dropped=counts.dropped,
            buffered=counts.tickets["buffered"],
            in_flight=counts.tickets["in_flight"],
            generators=len(self._desk.peers),
            changes=self._take_changes(),
            checkpoint_s=checkpoint_s,
            start_check={} if stats.start_check is None else stats.start_check.record(),
        )
        self._remember(record, now, received, lags)
        return record

    def _remember(self, record: StepRecord, now: float, received: int, lags: np.ndarray) -> None:
        self._last_s, self._last_received, self._finished_s = now, received, now
        self._num_trajectories += record.num_trajectories
        self._num_tokens += int(lags.sum())
        self._rewards.append(record.reward)
        size = max(len(self._lags), len(lags))
        self._lags = np.pad(self._lags, (0, size - len(self._lags))) + np.pad(lags, (0, size - len(lags)))
        self._generator = _sum(self._generator, record.generator)

    def status(self, status: str, cause: str) -> LearnerStatus:
        """The last row. Wall time runs from the first ticket to the last update."""
        counts = self._desk.gate.counts()
        started = self._desk.first_ticket_s
        wall = max(1e-9, self._finished_s - started) if started is not None else 0.0
        return LearnerStatus(
            status=status,
            cause=cause,
            step=self._desk.gate.step,
            wall_s=wall,
            samples_per_s=self._num_trajectories / wall if wall else 0.0,
            tokens_per_s=self._num_tokens / wall if wall else 0.0,
            reward_last_10=float(np.mean(self._rewards)) if self._rewards else 0.0,
            max_lag_seen=int(np.flatnonzero(self._lags)[-1]) if self._lags.any() else 0,
            lag_histogram=self._lags.tolist(),
            learner=_sum(self._learner_before, self._clock.split()),
            generator=self._generator,
            tickets=counts.tickets,
            trajectories=counts.trajectories,
            tokens=counts.tokens,
            dropped=counts.dropped,
        )


def _sum(a: TimeSplit, b: TimeSplit) -> TimeSplit:
    return TimeSplit(a.work + b.work, a.push + b.push, a.idle + b.idle, a.other + b.other)


def _lag_histogram(trajectories: list[Trajectory], step: int) -> np.ndarray:
    """Trained tokens by lag, when consumed by weights of `step`; masked ones (too old) are left out."""
    lags = np.zeros(1, np.int64)
    for trajectory in trajectories:
        for span in trajectory.spans:
            lag = step - span.version.step
            if lag >= len(lags):
                lags = np.pad(lags, (0, lag + 1 - len(lags)))
            lags[lag] += int(trajectory.loss_mask[span.start : span.end].sum())
    return lags


def _share(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / max(1, len(values))


def _duplicate_share(groups: list[Group]) -> float:
    """Completions that equal an earlier one of their group, as a share of all."""
    total = sum(len(group.trajectories) for group in groups)
    distinct = sum(len({t.token_ids.tobytes() for t in group.trajectories}) for group in groups)
    return 1.0 - distinct / total if total else 0.0
