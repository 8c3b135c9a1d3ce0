"""A desk with a clock that the test moves, bounded prompts, and generators that are no more than messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest

from headway.buffer import Group
from headway.config import EnvConfig, RunConfig
from headway.envs import Environment
from headway.learner.desk import Desk
from headway.learner.prompts import PromptSource
from headway.learner.setup import make_gate
from headway.learner.tickets import TicketMaker
from headway.model import Tokenizer
from headway.types import (
    FinishReason,
    MemberFailure,
    PolicyVersion,
    Ticket,
    TimeSplit,
    Trajectory,
    VersionSpan,
    prompt_digest,
)
from headway.wire.messages import (
    SCHEMA,
    DataMessage,
    Grant,
    Heartbeat,
    Hello,
    Trajectories,
    WeightAck,
    Welcome,
)

AnyMessage = TypeVar("AnyMessage", bound=DataMessage)


class Numbers:
    """An environment whose prompts are numbers; `count` of them, or endlessly many."""

    def __init__(self, count: int | None) -> None:
        self.num_prompts = count

    def prompt(self, index: int) -> str:
        return str(index)


class Digits:
    """A tokenizer: one id per character of a number."""

    def encode_prompt(self, prompt: str) -> list[int]:
        return [3 + int(character) for character in prompt]


def prompt_source(count: int | None = None, *, seed: int = 0, **config: Any) -> PromptSource:
    section = EnvConfig(name="numbers", **config)
    return PromptSource(cast("Environment", Numbers(count)), cast("Tokenizer", Digits()), section, seed)


def trajectory_of(
    ticket: Ticket,
    member: int,
    *,
    reward: float | None = 0.0,
    incarnation: str = "g0",
    versions: Sequence[PolicyVersion] | None = None,
    tokens: Sequence[int] = (5, 6, 7),
    **changes: Any,
) -> Trajectory:
    """A valid trajectory for a ticket; `versions` of its tokens, by default the ticket's."""
    prompt = len(ticket.prompt_ids)
    numbers = [ticket.admitted] * len(tokens) if versions is None else list(versions)
    ids = np.array([*ticket.prompt_ids, *tokens], np.int32)
    spans: list[VersionSpan] = []
    for place, version in enumerate(numbers, prompt):
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(spans[-1].start, place + 1, version)
        else:
            spans.append(VersionSpan(place, place + 1, version))
    values: dict[str, Any] = {
        "trajectory_id": f"{incarnation}.{ticket.ticket_id}.{member}",
        "ticket_id": ticket.ticket_id,
        "member": member,
        "prompt_index": ticket.prompt_index,
        "prompt_hash": prompt_digest(ticket.prompt_ids),
        "prompt_length": prompt,
        "token_ids": ids,
        "loss_mask": np.arange(len(ids)) >= prompt,
        "logprobs": np.where(np.arange(len(ids)) >= prompt, -1.5, 0.0).astype(np.float32),
        "spans": spans,
        "temperature": ticket.sampling.temperature,
        "finish_reason": FinishReason.STOP,
        "reward": reward,
        "num_cached": 0,
        "started_s": 1.0,
        "finished_s": 2.0,
    }
    return Trajectory(**{**values, **changes})


class Generator:
    """What a generator would say to the desk."""

    def __init__(self, office: Office, index: int, life: int = 0) -> None:
        self.office, self.index = office, index
        self.incarnation = f"g{index}-{life}"
        self.address = self.incarnation.encode()
        self.seq = self.beats = self.sampled = 0
        self.tickets: dict[int, Ticket] = {}

    def hello(self, **changes: Any) -> None:
        values: dict[str, Any] = {
            "run_id": "run", "schema": SCHEMA, "generator": self.index, "incarnation": self.incarnation, "pid": 1,
            "host": "here", "max_running": 64, "serving": None,
        }  # fmt: skip
        self.say(Hello(**{**values, **changes}))

    def ack(self, version: PolicyVersion, digest: str | None = None, pause_s: float = 0.0) -> None:
        named = self.office.digest_of(version) if digest is None else digest
        self.say(WeightAck(incarnation=self.incarnation, version=version, digest=named, pause_s=pause_s))

    def join(self, version: PolicyVersion | None = None) -> Generator:
        self.hello()
        self.ack(self.office.desk.gate.version if version is None else version)
        return self

    def beat(self, stalled_s: float = 0.0, **changes: Any) -> None:
        self.beats += 1
        values: dict[str, Any] = {
            "incarnation": self.incarnation, "seq": self.beats, "stalled_s": stalled_s, "serving": None,
            "running": 0, "waiting": 0, "tickets": 0, "generated": self.sampled, "unsent": 0,
            "split": TimeSplit(0.0, 0.0, 0.0, 0.0),
        }  # fmt: skip
        self.say(Heartbeat(**{**values, **changes}))

    def send(
        self,
        trajectories: Sequence[Trajectory] = (),
        failures: Sequence[MemberFailure] = (),
        seq: int | None = None,
    ) -> None:
        if seq is None:
            self.seq += 1
            seq = self.seq
            self.sampled += sum(len(t.token_ids) - t.prompt_length for t in trajectories)
            self.sampled += sum(failure.num_tokens for failure in failures)
        message = Trajectories(
            incarnation=self.incarnation, seq=seq, trajectories=list(trajectories), failures=list(failures),
            generated=self.sampled,
        )  # fmt: skip
        self.say(message)

    def finish(self, ticket: Ticket, rewards: Sequence[float | None] | None = None, **changes: Any) -> None:
        """The whole group in one message; rewards 0, 1, 2 ... by default."""
        values = list(range(ticket.num_members)) if rewards is None else rewards
        self.send(
            [
                trajectory_of(ticket, k, reward=v, incarnation=self.incarnation, **changes)
                for k, v in enumerate(values)
            ]
        )

    def say(self, message: DataMessage) -> None:
        self.office.desk.on_message(self.address, message)

    def heard(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        """Messages of a kind that the desk has for it, taken from the outbox."""
        outbox = self.office.desk.outbox
        mine: list[AnyMessage] = []
        for _ in range(len(outbox)):
            address, message = outbox.popleft()
            if address == self.address and isinstance(message, kind):
                mine.append(message)
            else:
                outbox.append((address, message))
        return mine

    def granted(self) -> list[Ticket]:
        """New tickets."""
        tickets = [ticket for grant in self.heard(Grant) for ticket in grant.tickets]
        self.tickets |= {ticket.ticket_id: ticket for ticket in tickets}
        return tickets


class Office:
    """A desk and what surrounds it."""

    def __init__(self, config: RunConfig, prompts: PromptSource) -> None:
        self.now = 1000.0
        self.config = config
        self.prompts = prompts
        self.lost: list[tuple[int, str]] = []
        self.digests: dict[PolicyVersion, str] = {}
        self.desk = Desk(
            config,
            "run",
            make_gate(config),
            prompts,
            TicketMaker(config, (2,)),
            lambda version: Welcome(
                manifest_digest="m", weight_channel="c", version=version, heartbeat_s=2.0
            ),
            lambda index, _pid, why: self.lost.append((index, why)),
            lambda: self.now,
        )
        self.publish(PolicyVersion(0, 0))

    def digest_of(self, version: PolicyVersion) -> str:
        return self.digests.get(version, f"digest of {version}")

    def publish(self, version: PolicyVersion) -> None:
        self.digests[version] = f"digest of {version}"
        self.desk.published(version, self.digests[version])

    def generator(self, index: int = 0, life: int = 0) -> Generator:
        return Generator(self, index, life)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.desk.tick()
        self.check()

    def check(self) -> dict[str, int]:
        """The ledger's tickets; raises when anything is not conserved."""
        counts = self.desk.gate.counts()
        for table, opened in (
            (counts.tickets, "issued"),
            (counts.trajectories, "received"),
            (counts.tokens, "received"),
        ):
            dropped = sum(number for key, number in table.items() if key.startswith("dropped."))
            assert dropped == table["dropped"]
            held = table["buffered"] + table.get("in_flight", 0)
            assert table[opened] == table["trained"] + table.get("masked", 0) + dropped + held
        return counts.tickets

    def train(self) -> list[Group]:
        """One optimizer step, if a batch is complete; publishes its version."""
        groups = self.desk.take().groups
        if groups:
            version = PolicyVersion(0, self.desk.gate.step + 1)
            self.desk.trained(groups, version)
            self.publish(version)
        self.check()
        return groups


@pytest.fixture
def office(tiny_config: Callable[..., RunConfig]) -> Callable[..., Office]:
    def make(count: int | None = None, *, passes: int = 0, **changes: Any) -> Office:
        changes = {"batch": {"prompts": 2, "samples": 2}, "steps": 100, **changes}
        return Office(tiny_config(**changes), prompt_source(count, passes=passes))

    return make


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., PromptSource]:
    return prompt_source


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    return trajectory_of


@pytest.fixture(scope="session")
def offices(tiny_model: Path) -> Callable[..., Office]:
    """As `office`, for tests that make many."""

    def make(count: int | None = None, *, passes: int = 0, **changes: Any) -> Office:
        sections: dict[str, Any] = {
            "steps": 100, "model": {"path": str(tiny_model)}, "env": {"name": "sort"},
            "batch": {"prompts": 2, "samples": 2}, "sampling": {"max_new_tokens": 6},
            "stream": {"heartbeat_s": 0.5, "rollout_deadline_s": 60.0}, **changes,
        }  # fmt: skip
        return Office(RunConfig.model_validate(sections), prompt_source(count, passes=passes))

    return make
