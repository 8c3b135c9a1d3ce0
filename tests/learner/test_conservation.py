"""Tickets, trajectories and tokens are conserved after every message of any schedule, and the bound holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import TrainingStopped
from headway.types import MemberFailure, PolicyVersion, Trajectory
from headway.wire.messages import Bye

KINDS = (
    "tick", "tick", "finish", "finish", "finish", "train", "train", "ack", "ack", "wait", "member", "fail", "invalid",
    "flat", "unrewarded", "again", "late", "restart", "goodbye", "join", "stranger", "silence",
)  # fmt: skip
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 7)), max_size=60)


class Play:
    """A schedule's events on a desk, and an account of its own of what they must have done."""

    def __init__(self, place: Any, make_trajectory: Callable[..., Trajectory]) -> None:
        self.place, self.make = place, make_trajectory
        self.generators = [place.generator(index).join() for index in range(2)]
        self.lives = [1, 1, 1]
        self.sent: set[tuple[int, int]] = set()
        self.received_tokens = 0
        self.trained: list[int] = []
        self.log: list[tuple[Any, Any, int]] = []

    def step(self, kind: str, which: int, number: int) -> None:
        generator = self.generators[which % len(self.generators)] if self.generators else None
        if kind in ("tick", "wait", "silence"):
            self.beat(except_=which if kind == "silence" else -1)
            self.place.tick({"tick": 0.1, "wait": 0.9, "silence": 1.1}[kind])
            self.forget_the_lost()
        elif kind == "train":
            self.train()
        elif kind in ("join", "restart"):
            self.restart(which)
        elif generator is not None:
            getattr(self, kind)(generator, number)
        for each in self.generators:
            each.granted()
        self.place.check()

    def beat(self, except_: int) -> None:
        for generator in self.generators:
            if generator.index != except_:
                generator.beat()

    def forget_the_lost(self) -> None:
        alive = {peer.incarnation for peer in self.place.desk.peers}
        self.generators = [generator for generator in self.generators if generator.incarnation in alive]

    def restart(self, index: int) -> None:
        self.generators = [generator for generator in self.generators if generator.index != index]
        self.generators.append(self.place.generator(index, self.lives[index]).join())
        self.lives[index] += 1

    def train(self) -> None:
        step = self.place.desk.gate.step
        for group in self.place.train():
            assert group.ticket_id not in self.trained
            self.trained.append(group.ticket_id)
            for trajectory in group.trajectories:
                assert trajectory.lag(step) <= self.place.config.staleness.max_lag

    def pick(self, generator: Any, number: int) -> Any:
        tickets = sorted(generator.tickets)
        return generator.tickets[tickets[number % len(tickets)]] if tickets else None

    def open_members(self, ticket: Any) -> list[int]:
        return [m for m in range(ticket.num_members) if (ticket.ticket_id, m) not in self.sent]

    def deliver(self, generator: Any, ticket: Any, members: list[int], **changes: Any) -> None:
        made = []
        for member in members:
            values = {"reward": float(member), "incarnation": generator.incarnation, **changes}
            made.append(self.make(ticket, member, **values))
        self.sent |= {(ticket.ticket_id, member) for member in members}
        self.received_tokens += 3 * len(made)
        self.log.append((generator, made, generator.seq + 1))
        generator.send(made)

    def finish(self, generator: Any, number: int, **changes: Any) -> None:
        ticket = self.pick(generator, number)
        if ticket is not None:
            self.deliver(generator, ticket, self.open_members(ticket), **changes)
            del generator.tickets[ticket.ticket_id]

    def member(self, generator: Any, number: int) -> None:
        ticket = self.pick(generator, number)
        if ticket is not None:
            self.deliver(generator, ticket, self.open_members(ticket)[:1])

    def flat(self, generator: Any, number: int) -> None:
        self.finish(generator, number, reward=1.0)

    def unrewarded(self, generator: Any, number: int) -> None:
        self.finish(generator, number, reward=None)

    def invalid(self, generator: Any, number: int) -> None:
        ticket = self.pick(generator, number)
        if ticket is not None:
            nan = np.full(len(ticket.prompt_ids) + 3, np.nan, np.float32)
            self.deliver(generator, ticket, self.open_members(ticket)[:1], logprobs=nan)

    def fail(self, generator: Any, number: int) -> None:
        ticket = self.pick(generator, number)
        members = self.open_members(ticket) if ticket is not None else []
        if members:
            reason = ("generation_failed", "reward_failed", "deadline", "no such reason")[number % 4]
            self.sent.add((ticket.ticket_id, members[0]))
            self.received_tokens += number
            generator.send(failures=[MemberFailure(ticket.ticket_id, members[0], reason, "", number)])

    def again(self, generator: Any, number: int) -> None:
        mine = [(made, seq) for who, made, seq in self.log if who is generator]
        if mine:
            made, seq = mine[number % len(mine)]
            generator.send(made, seq=seq)

    def late(self, generator: Any, number: int) -> None:
        """A trajectory of a ticket that has ended, or of one that never was, in a new message."""
        mine = [made for who, made, _ in self.log if who is generator and made]
        if mine:
            self.received_tokens += 3 * len(mine[number % len(mine)])
            generator.send(mine[number % len(mine)])

    def stranger(self, generator: Any, number: int) -> None:
        ticket = self.pick(generator, number)
        if ticket is not None:
            other = self.place.generator(9)
            other.incarnation = generator.incarnation
            self.received_tokens += 3
            other.send([self.make(ticket, 0)])

    def goodbye(self, generator: Any, number: int) -> None:
        generator.say(Bye(incarnation=generator.incarnation, unsent=0))
        self.generators.remove(generator)

    def ack(self, generator: Any, number: int) -> None:
        generator.ack(self.place.desk.gate.version)


def play_of(
    offices: Callable[..., Any], make: Callable[..., Trajectory], max_lag: int, bounded: bool
) -> Play:
    place = offices(
        9 if bounded else None,
        passes=2 if bounded else 0,
        generator={"replicas": 2},
        staleness={"max_lag": max_lag},
        stream={"heartbeat_s": 0.5, "rollout_deadline_s": 5.0},
        batch={"prompts": 4, "samples": 2},
    )
    return Play(place, make)


def check_the_end(play: Play) -> None:
    gate = play.place.desk.gate
    counts = gate.counts()
    assert counts.tokens["received"] == play.received_tokens
    assert counts.tickets["trained"] == len(play.trained) == len(set(play.trained))
    assert set(play.trained) <= set(range(counts.tickets["issued"]))
    assert counts.tickets["in_flight"] + counts.tickets["buffered"] <= gate.policy.slots
    assert gate.version == PolicyVersion(0, gate.step)
    play.place.desk.buffer.close()
    final = play.place.check()
    assert (final["in_flight"], final["buffered"]) == (0, 0)
    assert final["issued"] == final["trained"] + final["dropped"]


@settings(max_examples=100, deadline=None)
@given(events=EVENTS, max_lag=st.integers(0, 3), bounded=st.booleans())
def test_everything_is_conserved_after_every_message(
    offices: Callable[..., Any],
    make_trajectory: Callable[..., Trajectory],
    events: list[tuple[str, int, int]],
    max_lag: int,
    bounded: bool,
) -> None:
    play = play_of(offices, make_trajectory, max_lag, bounded)
    for event in events:
        try:
            play.step(*event)
        except TrainingStopped:  # too many failures in a row: the run is over, what it holds still balances
            play.place.check()
            return
    check_the_end(play)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_long_schedules_train_on(
    offices: Callable[..., Any], make_trajectory: Callable[..., Trajectory], max_lag: int
) -> None:
    """Faults are rarer here, so that the run gets far and groups of many steps meet."""
    draw = random.Random(max_lag)
    play = play_of(offices, make_trajectory, max_lag, bounded=False)
    for _ in range(1500):
        kind = draw.choice(KINDS if draw.random() < 0.3 else KINDS[:9])
        if kind == "ack" and max_lag == 0:  # a synchronous round waits for everybody
            for number in range(len(play.generators)):
                play.step("ack", number, 0)
        play.step(kind, draw.randrange(3) if kind != "join" else draw.randrange(2), draw.randrange(8))
        present = {generator.index for generator in play.generators}
        for index in {0, 1} - present:
            play.step("join", index, 0)
    assert len(play.trained) > 60
    check_the_end(play)
