"""What a run says of each optimizer step: one row in metrics.jsonl, one item when iterating an Engine."""

from __future__ import annotations

import msgspec


class TimeSplit(msgspec.Struct, frozen=True):
    """Where a process's wall time went, in seconds; the four parts sum to the elapsed time.

    For a learner `work` is the training step; for a generator it is decoding. `idle` is waiting for the other
    side, `push` is publishing or applying weights, `other` is everything else (packing, messages, logging).
    """

    work: float
    push: float
    idle: float
    other: float

    @property
    def total(self) -> float:
        """Seconds covered."""
        return self.work + self.push + self.idle + self.other

    def shares(self) -> TimeSplit:
        """The same as shares of the total (all zero when nothing was covered)."""
        total = self.total or 1.0
        return TimeSplit(self.work / total, self.push / total, self.idle / total, self.other / total)


class SettingChange(msgspec.Struct, frozen=True):
    """A setting that was changed while the run goes on.

    Attributes:
        key: dotted; value: as text; source: "user", or "target_ess" for the closed loop.
    """

    key: str
    value: str
    source: str


class StepRecord(msgspec.Struct, frozen=True):
    """One optimizer step.

    Attributes:
        step: optimizer steps done after this one, from 1; epoch: the version's epoch.
        time_s: Unix time; elapsed_s: since the first ticket.
        reward: mean over the trained trajectories and those of the groups replaced as zero_variance since the
            last row (all that was sampled for this step); reward_std: over the same.
        lag_mean, lag_max: of the trained tokens; lag_histogram: trained tokens by lag, index = lag.
        ess: effective sample size of the importance ratios, as a share of 1.
        loss, grad_norm, lr, entropy, kl_behaviour (k3), kl_reference (k3 or 0), clip_share, ratio_mean, ratio_max.
        weight_mean: of the objective's own weight before its bounds; rejected_share: loss tokens masked by it.
        num_groups, num_trajectories, num_tokens (trained), num_forwarded (after prefix sharing), num_rows.
        completion_tokens: mean sampled tokens per trained trajectory; stop_share: of them finished by a stop.
        duplicate_share: trained completions that equal another of their group.
        queue_s: mean seconds between a trajectory's last token and its consumption.
        tokens_per_s: trained tokens per second of this step's wall time; generated_per_s: received likewise.
        learner, generator: time splits over this step (generator: mean over the live ones).
        push_s: seconds to publish; changed_share: published elements that changed; push_bytes.
        ack_s, pause_s: of the generators' acks since the last row, 0 without one: mean seconds from a publication
            to its ack, and that decoding stood still for it.
        skipped: the step's gradient was not finite, so no update was made.
        tickets, trajectories, tokens: the ledger's counts after the step (see headway.staleness.ledger).
        dropped: tickets by drop reason, since the start; buffered: groups waiting in the buffer.
        in_flight: tickets outstanding at the generators; generators: live ones.
        changes: settings changed since the last row; the step was made with them.
        checkpoint_s: seconds that training has stood still for checkpoints since the last row (part of
            learner.other).
        start_check: of the tokens at lag 0 that were scored on both sides before the run's first updates: tokens,
            mean_log_ratio, max_log_ratio, ess; empty in later rows.
    """

    step: int
    epoch: int
    time_s: float
    elapsed_s: float
    reward: float
    reward_std: float
    lag_mean: float
    lag_max: int
    lag_histogram: list[int]
    ess: float
    loss: float
    grad_norm: float
    lr: float
    entropy: float
    kl_behaviour: float
    kl_reference: float
    clip_share: float
    ratio_mean: float
    ratio_max: float
    num_groups: int
    num_trajectories: int
    num_tokens: int
    num_forwarded: int
    num_rows: int
    completion_tokens: float
    stop_share: float
    duplicate_share: float
    queue_s: float
    tokens_per_s: float
    generated_per_s: float
    learner: TimeSplit
    generator: TimeSplit
    push_s: float
    changed_share: float
    push_bytes: int
    skipped: bool
    tickets: dict[str, int]
    trajectories: dict[str, int]
    tokens: dict[str, int]
    dropped: dict[str, int]
    buffered: int
    in_flight: int
    generators: int
    changes: list[SettingChange] = []
    checkpoint_s: float = 0.0
    weight_mean: float = 0.0
    rejected_share: float = 0.0
    start_check: dict[str, float] = {}
    ack_s: float = 0.0
    pause_s: float = 0.0


class LearnerStatus(msgspec.Struct, frozen=True):
    """The learner's last row, written on success, failure and signal alike.

    Attributes:
        status: "finished" | "stopped" | "failed"; cause: why, for people ("" when finished).
        step: optimizer steps done; the ledger's last counts follow.
        lag_histogram: trained tokens by lag over the whole run.
    """

    status: str
    cause: str
    step: int
    wall_s: float
    samples_per_s: float
    tokens_per_s: float
    reward_last_10: float
    max_lag_seen: int
    lag_histogram: list[int]
    learner: TimeSplit
    generator: TimeSplit
    tickets: dict[str, int]
    trajectories: dict[str, int]
    tokens: dict[str, int]
    dropped: dict[str, int]
