"""Serial mode: the learner's and the generator's own parts on one thread, in a fixed order.

The same desk, rollout loop, trainer and engine as in a run of processes; only sockets, shared memory and threads
are left out: messages are handed over directly and weights are copied from the trainer's buffer. For tests, for
debugging with a debugger, and for the synchronous limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from headway.buffer import Group
from headway.config import RunConfig
from headway.config.loading import parse_value
from headway.errors import DeadlineExceeded, HeadwayError
from headway.generator import Rollout, build_engine, build_rewards
from headway.learner import Desk, LearnerParts, Recorder, build_learner
from headway.learner.live import Settings
from headway.learner.publisher import NO_PUSH, PushInterval, PushStats
from headway.model import Policy, save_policy
from headway.telemetry import SplitClock
from headway.trainer import check_agreement
from headway.types import LearnerStatus, PolicyVersion, StepRecord
from headway.weights import weights_digest
from headway.wire.messages import SCHEMA, Cancel, DataMessage, Grant, Hello, Welcome

REWARD_WAIT_S = 1.0


class DirectWeights:
    """A weight source that reads the trainer's buffer: there is no moment at which it could be half written."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.version: PolicyVersion | None = None
        self.digest = ""

    def publish(self, version: PolicyVersion) -> str:
        """The trainer's weights, as they are now, are `version`; returns their digest."""
        dtype = torch.bfloat16 if self._policy.manifest.dtype == "bfloat16" else torch.float32
        self.version, self.digest = version, weights_digest(self._policy.flat.to(dtype))
        return self.digest

    def newest(self) -> PolicyVersion | None:
        """The version that fetch would bring."""
        return self.version

    def fetch(self, flat: Tensor) -> tuple[PolicyVersion, str]:
        """Copy it."""
        assert self.version is not None
        flat.copy_(self._policy.flat)
        return self.version, self.digest


class SerialRun:
    """One run on one thread.

    Args:
        config: the recipe; note: told what takes long.
    """

    def __init__(self, config: RunConfig, note: Callable[[str], None] = lambda line: None) -> None:
        self.config = config
        self.parts: LearnerParts = build_learner(config, note)
        self.desk = Desk(
            config,
            "serial",
            self.parts.gate,
            self.parts.prompts,
            self.parts.tickets,
            lambda version: Welcome(
                manifest_digest=self.parts.policy.manifest.digest,
                weight_channel="",
                version=version,
                heartbeat_s=0.0,
            ),
            lambda index, pid, why: note(f"generator {index} is given up: {why}"),
            time.monotonic,
        )
        self.weights = DirectWeights(self.parts.policy)
        self.clock = SplitClock()
        self.interval = PushInterval(config.push.interval)
        self.settings = Settings(config, self.desk, self.parts.trainer, self.interval, note)
        self.recorder = Recorder(self.desk, self.settings.take_changes, self.clock)
        self.version = PolicyVersion(0, 0)
        self.rollouts = [self._make_rollout(index) for index in range(config.generator.replicas)]
        self._publish()

    def _make_rollout(self, index: int) -> Rollout:
        engine = build_engine(self.config, self.parts.folder, self.parts.tokenizer)
        rewards = build_rewards(self.config)
        incarnation = f"g{index}-serial"
        hello = Hello(
            run_id="serial",
            schema=SCHEMA,
            generator=index,
            incarnation=incarnation,
            pid=0,
            host="",
            max_running=self.config.generator.max_running,
            serving=None,
        )
        self.desk.on_message(incarnation.encode(), hello)
        return Rollout(incarnation, engine, rewards, self.weights, self.parts.tokenizer.decode_many)

    def steps(self) -> Iterator[StepRecord]:
        """Yields a StepRecord for each optimizer step until the run is over."""
        while self.version.step < self.config.steps:
            with self.clock("idle"):
                groups = self._collect()
            if not groups:
                return
            yield self._train(groups)

    def set(self, key: str, value: str) -> None:
        """Change a live setting, as `headway set` does to a run of processes."""
        self.settings.set(key, parse_value(key, value))

    def _collect(self) -> list[Group]:
        """Turn the rollouts until a batch is complete; empty when the prompts are used up."""
        deadline = time.monotonic() + self.config.stream.rollout_deadline_s
        while True:
            for rollout in self.rollouts:
                self._turn(rollout)
            if self.desk.drained:
                return []
            groups = self.desk.take().groups
            if groups:
                return groups
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"no complete batch for {self.config.stream.rollout_deadline_s:.0f} s")

    def _turn(self, rollout: Rollout) -> None:
        for other in self.rollouts:
            self.desk.heard(other.incarnation.encode())
        self.desk.tick()
        self._deliver()
        rollout.refresh()
        rollout.turn()
        while rollout.num_scoring:  # rewards in the order of their jobs, whatever the workers' speed
            rollout.collect(rollout.rewards.wait(REWARD_WAIT_S))
            rollout.rewards.check()
        acks, message = rollout.take()
        for item in (*acks, message):
            if item is not None:
                self.desk.on_message(rollout.incarnation.encode(), item)

    def _deliver(self) -> None:
        by_address = {rollout.incarnation.encode(): rollout for rollout in self.rollouts}
        while self.desk.outbox:
            address, message = self.desk.outbox.popleft()
            _hand_over(by_address[address], message)

    def _train(self, groups: list[Group]) -> StepRecord:
        consumed = self.version
        with self.clock("work"):
            stats = self.parts.trainer.step(groups, consumed.step + 1)
        push = NO_PUSH
        if not stats.skipped:
            self.version = PolicyVersion(consumed.epoch, consumed.step + 1)
        self.desk.trained(groups, self.version)
        if not stats.skipped and self.interval.due(
            self.version.step, last=self.version.step == self.config.steps
        ):
            push = self._publish()
        record = self.recorder.step(groups, consumed, self.version, stats, push)
        self.settings.observe(record)
        if consumed.step == 0:
            check_agreement(stats.policy, record.lag_max)
        return record

    def _publish(self) -> PushStats:
        started = time.perf_counter()
        with self.clock("push"):
            digest = self.weights.publish(self.version)
        self.desk.published(self.version, digest)
        return PushStats(time.perf_counter() - started, self.parts.policy.manifest.num_bytes, 1.0)

    def close(self) -> None:
        """End the reward workers and every outstanding ticket."""
        for rollout in self.rollouts:
            rollout.rewards.close()
        self.desk.buffer.close()


def _hand_over(rollout: Rollout, message: DataMessage) -> None:
    match message:
        case Grant():
            rollout.grant(message.tickets)
        case Cancel():
            rollout.cancel(message.ticket_ids)
        case _:
            pass


def run_serial(
    config: RunConfig,
    run_dir: Path,
    on_record: Callable[[StepRecord], None],
    note: Callable[[str], None] = lambda line: None,
) -> LearnerStatus:
    """`headway run --serial`: a whole run; `on_record` is told each step.

    Raises:
        HeadwayError: the recipe's model or environment cannot be used.
    """
    run = SerialRun(config, note)
    status, cause = "finished", ""
    try:
        for record in run.steps():
            on_record(record)
        if run.version.step < config.steps:
            cause = f"the prompts are used up after {run.version.step} updates"
        if config.save:
            save_policy(run.parts.policy, run.parts.folder, run_dir / "policy")
    except KeyboardInterrupt:
        status, cause = "stopped", "signal SIGINT"
    except HeadwayError as error:
        status, cause = "failed", str(error)
    finally:
        run.close()
    return run.recorder.status(status, cause)
