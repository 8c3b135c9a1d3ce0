"""Serial mode: the learner's and the generator's own parts on one thread, in a fixed order.

The same desk, rollout loop, trainer and engine as in a run of processes; only sockets, shared memory and threads
are left out: messages are handed over directly and weights are copied from the trainer's buffer. For tests, for
debugging with a debugger, and for the synchronous limit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from headway.buffer import Group
from headway.checkpoint import Attempt
from headway.config import RunConfig, RunFolder, derived
from headway.config.loading import parse_value
from headway.errors import DeadlineExceeded, HeadwayError
from headway.generate import InferenceEngine
from headway.generator import Rollout, build_engine, build_rewards
from headway.learner import Desk, LearnerParts, Recorder, build_learner
from headway.learner.checkpoints import Checkpoints, open_state
from headway.learner.live import Settings
from headway.learner.publisher import NO_PUSH, PushInterval, PushStats
from headway.learner.resume import resume_desk, resume_parts, resume_rows
from headway.model import Policy, save_policy
from headway.telemetry import SplitClock, spans_in
from headway.trainer import Agreement
from headway.types import LearnerStatus, PolicyVersion, StepRecord
from headway.weights import Proof, published_dtype, state_digest
from headway.wire.messages import SCHEMA, Cancel, DataMessage, Grant, Hello, Welcome

REWARD_WAIT_S = 1.0


class DirectWeights:
    """The trainer's buffer as what is published: there is no moment at which it could be half written."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.version: PolicyVersion | None = None
        self.digest = ""
        self._bits: Tensor | None = None

    def publish(self, version: PolicyVersion) -> float:
        """The trainer's weights, as they are now, are `version`; returns the share of elements that changed."""
        dtype = published_dtype(self.policy.manifest)
        published = self.policy.flat.to(dtype)
        self.version, self.digest = version, state_digest(published)
        bits = published.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
        before, self._bits = self._bits, bits.clone()
        if before is None:
            return 1.0
        num_elements = sum(spec.size for spec in self.policy.manifest.tensors)
        return int((bits != before).sum()) / max(1, num_elements)


class DirectSource:
    """A weight source that copies from the trainer's buffer into one engine."""

    unproved = False

    def __init__(self, weights: DirectWeights, engine: InferenceEngine) -> None:
        self._weights, self._engine = weights, engine
        self._proofs: list[Proof] = []

    def staged(self) -> PolicyVersion | None:
        """The version that a commit would bring."""
        newest, held = self._weights.version, self._engine.version
        return newest if newest is not None and (held is None or newest > held) else None

    def commit(self) -> PolicyVersion | None:
        """Copy it."""
        version = self._weights.version
        assert version is not None

        def copy(flat: Tensor) -> PolicyVersion:
            flat.copy_(self._weights.policy.flat)
            return version

        self._engine.apply(copy)
        self._proofs.append(Proof(version, self._weights.digest))
        return version

    def relieve(self) -> bool:
        """Nothing is served from here."""
        return False

    def proofs(self) -> list[Proof]:
        """Of the commits since the last call."""
        proofs, self._proofs = self._proofs, []
        return proofs


class SerialRun:
    """One run on one thread.

    Args:
        config: the recipe; note: told what takes long.
        folder: where checkpoints go and come from; None: without any.
        attempt: what it starts from. stopping: asked between turns why to stop, "" to go on.
    """

    def __init__(
        self,
        config: RunConfig,
        note: Callable[[str], None] = lambda line: None,
        folder: RunFolder | None = None,
        attempt: Attempt | None = None,
        stopping: Callable[[], str] = lambda: "",
    ) -> None:
        self.config = config
        self.attempt = attempt or Attempt(0)
        self.stopping = stopping
        self._note = note
        spans = folder.spans if folder is not None and config.telemetry.spans else None
        folder = folder or RunFolder(Path(), "serial")
        parts = build_learner(config, note)
        state = open_state(folder, config, self.attempt, parts)
        self.parts: LearnerParts = resume_parts(parts, config, self.attempt, state)
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
        self.clock = SplitClock(spans=spans_in(spans, "learner", "learner", f"learner-{self.attempt.epoch}"))
        self.interval = PushInterval(config.push.interval)
        self.settings = Settings(config, self.desk, self.parts.trainer, self.interval, note)
        self.recorder = Recorder(self.desk, self.settings.take_changes, self.clock)
        if self.attempt.epoch:
            note(str(resume_desk(folder, config, self.attempt, self.parts, state, self.desk)))
        resume_rows(state, self.settings, self.recorder)
        self.checkpoints = Checkpoints(
            folder, config, self.attempt, self.parts, self.desk, self.settings, self.recorder,
            contextlib.nullcontext(), note,
        )  # fmt: skip
        self.version = self.attempt.version
        self._agreement = Agreement(derived.largest_log_ratio(config))
        self.rollouts = [self._make_rollout(index) for index in range(config.generator.replicas)]
        self._publish()

    def _make_rollout(self, index: int) -> Rollout:
        engine = build_engine(self.config, self.parts.folder, self.parts.tokenizer)
        rewards = build_rewards(self.config)
        incarnation = f"g{index}-serial{self.attempt.epoch}"
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
        return Rollout(
            incarnation,
            engine,
            rewards,
            DirectSource(self.weights, engine),
            self.parts.tokenizer.decode_many,
            mode=self.config.push.mode,
        )

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
            if self.desk.drained or self.stopping():
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
        for item in (*rollout.take_acks(), rollout.take()):
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
        for line in stats.notes:
            self._note(line)
        if not stats.skipped:
            self.version = PolicyVersion(consumed.epoch, consumed.step + 1)
        self.desk.trained(groups, self.version)
        if not stats.skipped and self.interval.due(
            self.version.step, last=self.version.step == self.config.steps
        ):
            push = self._publish()
        blocked_s = self.checkpoints.take_blocked_s()
        record = self.recorder.step(groups, consumed, self.version, stats, push, blocked_s)
        self.settings.observe(record)
        self.checkpoints.row(record)
        self._agreement.check(stats.policy, record.lag_max, consumed.step)
        return record

    def _publish(self) -> PushStats:
        started = time.perf_counter()
        with self.clock("push"):
            share = self.weights.publish(self.version)
        self.desk.published(self.version, self.weights.digest)
        return PushStats(time.perf_counter() - started, self.parts.policy.manifest.num_bytes, share)

    def close(self) -> None:
        """End the reward workers and every outstanding ticket."""
        for rollout in self.rollouts:
            rollout.rewards.close()
        self.desk.buffer.close()
        self.clock.close()


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
    attempt: Attempt | None = None,
    stopping: Callable[[], str] = lambda: "",
) -> LearnerStatus:
    """`headway run --serial`: a whole run; `on_record` is told each step.

    Args:
        run_dir: its folder. attempt: what it starts from. stopping: asked now and then why to stop, "" to go on.

    Raises:
        HeadwayError: the recipe's model or environment cannot be used.
    """
    run = SerialRun(config, note, RunFolder(run_dir, "serial"), attempt, stopping)
    status, cause = "finished", ""
    try:
        for record in run.steps():
            on_record(record)
            run.checkpoints.maybe_save(run.version.step)
        if run.version.step < config.steps:
            cause = stopping() or f"the prompts are used up after {run.version.step} updates"
        status = "stopped" if stopping() else status
        run.checkpoints.save_last(run.version.step, stopped=bool(stopping()))
        if config.save:
            save_policy(run.parts.policy, run.parts.folder, run_dir / "policy")
    except KeyboardInterrupt:
        status, cause = "stopped", "signal SIGINT"
    except HeadwayError as error:
        status, cause = "failed", str(error)
    finally:
        run.close()
    return run.recorder.status(status, cause)
