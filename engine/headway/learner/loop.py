"""The learner's main loop.

while steps are left:
    serve commands
    groups  = intake.take()               # waits for a complete batch; unblocked by its last arrival
    stats   = trainer.step(groups)
    version = publish                     # before the slots return, so that whoever gets one can have it
    intake.trained(groups, version)
    record
    checkpoint
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from headway.buffer import Group
from headway.config import RunConfig, derived
from headway.learner.checkpoints import Checkpoints
from headway.learner.failures import RewardWatch
from headway.learner.intake import Intake
from headway.learner.publisher import NO_PUSH, Publisher, PushStats
from headway.learner.records import Recorder
from headway.telemetry import SplitClock
from headway.trainer import Agreement, StepStats, Trainer
from headway.types import PolicyVersion, StepRecord

_log = logging.getLogger(__name__)


class LearnerLoop:
    """Trains until the recipe's steps are done, the prompts are used up, or somebody says stop.

    Args:
        config: the recipe; start: version of the weights; the other parts as their classes say.
        observe: told every StepRecord while the desk is held; emit: told it afterwards.
        serve: called between steps and a few times a second while waiting.
        stopping: why to stop, "" to go on. note: told what people should know.
    """

    def __init__(
        self,
        config: RunConfig,
        start: PolicyVersion,
        intake: Intake,
        trainer: Trainer,
        publisher: Publisher,
        recorder: Recorder,
        observe: Callable[[StepRecord], None],
        checkpoints: Checkpoints,
        clock: SplitClock,
        emit: Callable[[StepRecord], None],
        serve: Callable[[], None],
        stopping: Callable[[], str],
        note: Callable[[str], None],
    ) -> None:
        self.version = start
        self._config = config
        self._intake = intake
        self._trainer = trainer
        self._publisher = publisher
        self._recorder = recorder
        self._observe = observe
        self._checkpoints = checkpoints
        self._clock = clock
        self._emit = emit
        self._serve = serve
        self._stopping = stopping
        self._note = note
        self._rewards = RewardWatch()
        self._agreement = Agreement(derived.largest_log_ratio(config))

    def run(self) -> str:
        """Train; returns why it ended before its last step, "" if it did not.

        Raises:
            HeadwayError: training cannot go on.
        """
        self._publish(expect_change=False)
        while self.version.step < self._config.steps:
            with self._clock("idle"):
                groups = self._intake.take(interrupted=self._interrupted)
            if not groups:
                return self._stopping() or f"the prompts are used up after {self.version.step} updates"
            with self._clock("work"):
                stats = self._trainer.step(groups, self.version.step + 1)
            self._conclude(groups, stats)
            self._checkpoints.maybe_save(self.version.step)
        return ""

    def _conclude(self, groups: list[Group], stats: StepStats) -> None:
        """Book the step: its version, its push, its row."""
        consumed = self.version
        push = NO_PUSH
        for line in stats.notes:
            self._note(line)
        if not stats.skipped:
            self.version = PolicyVersion(consumed.epoch, consumed.step + 1)
        self._intake.trained(groups, self.version)
        if not stats.skipped and self._publisher.due(self.version.step, last=self._is_last()):
            # Without a gradient (every group flat) AdamW may leave every weight where it is.
            push = self._publish(expect_change=stats.lr > 0 and stats.grad_norm > 0)
        with self._intake.lock:
            blocked_s = self._checkpoints.take_blocked_s()
            record = self._recorder.step(groups, consumed, self.version, stats, push, blocked_s)
            self._observe(record)
        self._checkpoints.row(record)
        self._emit(record)
        self._agreement.check(stats.policy, record.lag_max, consumed.step)
        warning = self._rewards.observe(record.reward, record.reward_std)
        if warning:
            self._note(warning)

    def _publish(self, *, expect_change: bool) -> PushStats:
        with self._clock("push"):
            published, push = self._publisher.publish(self.version, expect_change=expect_change)
        self._intake.published(self.version, published.digest)
        return push

    def _is_last(self) -> bool:
        return self.version.step == self._config.steps

    def _interrupted(self) -> bool:
        self._serve()
        return bool(self._stopping())
