"""What this machine does of each kind of work, measured on a recipe's own model, prompts and rewards.

The parts of a run on one thread, without the loop around them: a rollout generates real groups (lengths, decode steps,
rewards), the trainer trains some of them (in memory only), and weights are published and applied. Minutes at most.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.buffer import Group
from headway.config import RunConfig
from headway.errors import HeadwayError
from headway.generator import Rollout, build_engine, build_rewards
from headway.learner import LearnerParts, build_learner
from headway.serial.run import REWARD_WAIT_S, DirectSource, DirectWeights
from headway.types import PolicyVersion, Ticket, Trajectory

REPEATS = 5
FEW_ENDS = 0.05  # of the running sequences: so few that end do not show in a decode step
WAVE_SIZES = 4  # up to the most that fit
LEAST_GROUPS = 96  # whose lengths stand for all, if there is time for so many


@dataclass
class Measurements:
    """Raw figures, in seconds, tokens and bytes.

    Attributes:
        decode: seconds of the turns without a prefill in which hardly any sequence ended, by running sequences;
            by_context: of the same turns (running sequences, tokens of context that each has, seconds).
        ends: (running sequences, those that ended, seconds) of the other turns without a prefill.
        prefill: (prompt tokens, seconds beyond the decode step) of the turns with one.
        train: (sampled tokens and one prompt a group, seconds) of the updates; what completions share of their
            beginnings is in the seconds.
        publish_s, apply_s: of a push of push_bytes; reward: a worker's on a completion.
        lengths: of each group; prompt_tokens: of each prompt; num_flat: groups whose members earned the same.
        ess: (updates made since the weights that sampled, effective sample size) of each update.
    """

    decode: dict[int, list[float]] = field(default_factory=lambda: defaultdict[int, list[float]](list))
    by_context: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    ends: list[tuple[int, int, float]] = field(default_factory=list[tuple[int, int, float]])
    prefill: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    train: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    publish_s: float = 0.0
    apply_s: float = 0.0
    push_bytes: int = 0
    reward: list[float] = field(default_factory=list[float])
    lengths: list[list[int]] = field(default_factory=list[list[int]])
    prompt_tokens: list[int] = field(default_factory=list[int])
    num_flat: int = 0
    ess: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])


class Calibration:
    """One measurement.

    Args:
        config: the recipe; seconds: about as long as generating and training may take together.
        note: told what takes long.

    Attributes:
        groups: finished ones, in the order in which they ended.

    Raises:
        HeadwayError: the recipe's model or environment cannot be used.
    """

    def __init__(
        self, config: RunConfig, seconds: float, note: Callable[[str], None] = lambda line: None
    ) -> None:
        self._config = config
        self._seconds = seconds
        self._note = note
        self._parts: LearnerParts = build_learner(config, note)
        self._weights = DirectWeights(self._parts.policy)
        engine = build_engine(config, self._parts.folder, self._parts.tokenizer)
        self._source = DirectSource(self._weights, engine)
        self._rollout = Rollout(
            "calibration", engine, build_rewards(config), self._source, self._parts.tokenizer.decode_many
        )
        self._next_ticket = self._num_updates = self._num_turns = 0
        self._open: dict[int, tuple[Ticket, list[Trajectory]]] = {}
        self.groups: list[Group] = []
        self.measured = Measurements()

    def run(self) -> Measurements:
        """Measure everything; ends the reward workers."""
        try:
            self._push()
            self._generate()
            self._train()
        finally:
            self._rollout.rewards.close()
        return self.measured

    def _push(self) -> None:
        """Publish and apply, as far as both happen on the learner's and the generator's own time."""
        publish, apply = list[float](), list[float]()
        for step in range(REPEATS):
            began_s = time.perf_counter()
            self._weights.publish(PolicyVersion(0, step))
            published_s = time.perf_counter()
            self._source.commit()
            publish.append(published_s - began_s)
            apply.append(time.perf_counter() - published_s)
        self._source.proofs()
        self.measured.publish_s = statistics.median(publish)
        self.measured.apply_s = statistics.median(apply)
        self.measured.push_bytes = self._parts.policy.manifest.num_bytes

    # Generation -----------------------------------------------------------------------------------------------

    def _generate(self) -> None:
        """Waves of few and of many groups, until there are enough to train and half of the time is over."""
        batch, generator = self._config.batch, self._config.generator
        most = max(1, generator.max_running // batch.samples)
        sizes = sorted({1, *(max(1, most * part // WAVE_SIZES) for part in range(1, WAVE_SIZES + 1))})[::-1]
        wanted = max(LEAST_GROUPS, 2 * batch.prompts)
        began_s, wave = time.monotonic(), 0
        while len(self.groups) < wanted or wave < REPEATS * len(sizes):
            if not self._wave(sizes[wave % len(sizes)]):
                break
            wave += 1
            if time.monotonic() - began_s > self._seconds / 2 and len(self.groups) >= batch.prompts:
                break
        self._note(f"generated {len(self.groups)} groups in {time.monotonic() - began_s:.0f} s")

    def _wave(self, num_groups: int) -> bool:
        """Generate so many groups side by side; False when there are no prompts left."""
        tickets: list[Ticket] = []
        for _ in range(num_groups):
            prompt = self._parts.prompts.next()
            if prompt is None:
                break
            assert self._rollout.engine.version is not None
            ticket = self._parts.tickets.make(self._next_ticket, prompt, self._rollout.engine.version)
            self._next_ticket += 1
            self._open[ticket.ticket_id] = (ticket, [])
            self.measured.prompt_tokens.append(len(ticket.prompt_ids))
            tickets.append(ticket)
        if not tickets:
            return False
        self._rollout.grant(tickets)
        self._num_turns = 0  # of this wave, whose sequences begin together
        prompt_tokens = sum(len(ticket.prompt_ids) for ticket in tickets)
        deadline = time.monotonic() + self._config.stream.rollout_deadline_s
        while self._rollout.num_tickets:
            prompt_tokens = self._turn(prompt_tokens)
            if time.monotonic() > deadline:
                raise HeadwayError(
                    f"{self._rollout.num_tickets} groups did not finish within stream.rollout_deadline_s"
                )
        return True

    def _turn(self, prompt_tokens: int) -> int:
        """One turn; returns the prompt tokens that still wait for theirs, 0 once sequences decode."""
        engine, rollout = self._rollout.engine, self._rollout
        running, sampled = engine.num_running, engine.num_sampled
        began_s = time.perf_counter()
        rollout.turn()
        seconds = time.perf_counter() - began_s
        if prompt_tokens:
            self.measured.prefill.append((prompt_tokens, seconds))
        elif engine.num_sampled - sampled == running and running:
            ended = running - engine.num_running
            if ended > FEW_ENDS * running:
                self.measured.ends.append((running, ended, seconds))
            else:
                self.measured.decode[running].append(seconds)
                context = statistics.fmean(self.measured.prompt_tokens) + self._num_turns
                self.measured.by_context.append((running, context, seconds))
        self._num_turns += 1
        self._rewards()
        message = rollout.take()
        for trajectory in message.trajectories if message is not None else []:
            self._arrived(trajectory)
        return 0 if engine.num_sampled > sampled else prompt_tokens

    def _rewards(self) -> None:
        while self._rollout.num_scoring:
            self._rollout.collect(self._rollout.rewards.wait(REWARD_WAIT_S))
            self._rollout.rewards.check()
        self.measured.reward = list(self._rollout.rewards.seconds)

    def _arrived(self, trajectory: Trajectory) -> None:
        ticket, members = self._open[trajectory.ticket_id]
        members.append(trajectory)
        if len(members) < ticket.num_members:
            return
        del self._open[trajectory.ticket_id]
        group = Group(ticket, sorted(members, key=lambda member: member.member), [], 0.0)
        self.groups.append(group)
        self.measured.lengths.append([member.num_sampled for member in group.trajectories])
        self.measured.num_flat += len({member.reward for member in members}) == 1

    # Training -------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        """Updates on half a batch, a whole and two, the first of all not counted."""
        prompts = self._config.batch.prompts
        sizes = sorted({max(1, prompts // 2), prompts, min(2 * prompts, len(self.groups))})
        sizes = [size for size in sizes if size <= len(self.groups)]
        if not sizes:
            raise HeadwayError(
                "no group was finished with a reward for each member: there is nothing to train"
            )
        self._update(self.groups[: sizes[0]])
        began_s = time.monotonic()
        for turn in range(REPEATS):
            for size in sizes:
                start = turn * size % max(1, len(self.groups) - size + 1)
                self.measured.train.append(self._update(self.groups[start : start + size]))
            if time.monotonic() - began_s > self._seconds / 2:
                break
        self._note(f"trained {len(self.measured.train)} updates in {time.monotonic() - began_s:.0f} s")

    def _update(self, groups: Sequence[Group]) -> tuple[int, float]:
        learner = self._config.learner
        began_s = time.perf_counter()
        stats = self._parts.trainer.step(groups, min(self._config.steps, learner.warmup_steps + 1))
        seconds = time.perf_counter() - began_s
        self.measured.ess.append((self._num_updates, stats.policy.ess))
        self._num_updates += not stats.skipped and stats.grad_norm > 0
        return sum(group.num_tokens + len(group.ticket.prompt_ids) for group in groups), seconds
