"""Runs on a virtual clock: random generators, deaths, deadlines, drops and push delays against the real gate.

The simulation keeps its own tallies; at every event the ledger must agree with them. No wall time passes.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from headway.staleness import (
    CapacityPolicy,
    DropPolicy,
    Finished,
    Gate,
    StalenessPolicy,
    WaitPolicy,
    WindowPolicy,
)
from headway.staleness.free import FreePolicy
from headway.types import DropReason, PolicyVersion, Sampling, Ticket

DEADLINE_S = 60.0


@dataclass
class World:
    """What differs between schedules."""

    policy: StalenessPolicy
    num_members: int = 2
    num_generators: int = 2
    capacity: int = 4  # groups that a generator decodes at once; others wait there
    generate_s: tuple[float, float] = (0.5, 2.0)
    straggler: float = 0.0  # chance of a group that takes 30 times as long
    hang: float = 0.0  # chance of a group that never finishes
    train_s: tuple[float, float] = (0.5, 2.0)
    push_s: tuple[float, float] = (0.0, 0.1)
    death: float = 0.0  # chance, per finished group, that its generator dies
    zero_variance: float = 0.0
    num_steps: int = 12


@dataclass
class Generator:
    """One generator: the version in force, the tickets it holds, and the groups it decodes."""

    name: str
    acked: int = 0
    alive: bool = True
    waiting: list[int] = field(default_factory=list[int])
    running: dict[int, set[int]] = field(
        default_factory=dict[int, set[int]]
    )  # ticket -> steps that sampled it


class Simulation:
    """Runs a world to its last step; `lags` and `trained` are what was consumed."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.gate = Gate(world.policy)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.num_events = 0
        self.generators = [Generator(f"g{k}.0") for k in range(world.num_generators)]
        self.finished: dict[int, Finished] = {}
        self.training = False
        self.lags: Counter[int] = Counter()
        self.trained: list[int] = []
        self.tickets: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.idle_s = 0.0
        self.free_since = 0.0

    def run(self) -> Simulation:
        """Play until the last step; an empty calendar before it is a deadlock."""
        self.turn()
        while self.gate.step < self.world.num_steps:
            assert self.events, f"deadlock at step {self.gate.step}: {self.gate.counts()}"
            self.now, _, action = heapq.heappop(self.events)
            action()
            self.turn()
        return self

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (self.now + delay_s, self.num_events, action))

    def turn(self) -> None:
        """What the learner does on every event: grant, take a batch if it can, check the books."""
        self.grant()
        if not self.training:
            selection = self.gate.select(self.finished.values())
            assert not (self.world.policy.bounded and selection.drop), "the bound makes this impossible"
            for ticket_id, reason in selection.drop:
                assert reason is DropReason.STALE
                del self.finished[ticket_id]
                self.tickets["dropped"] += 1
                self.tickets["stale"] += 1
            if selection.take:
                self.consume(selection.take)
        self.gate.ledger.check()
        counts = self.gate.ledger.counts()
        in_flight = sum(len(g.waiting) + len(g.running) for g in self.generators)
        assert counts.tickets["in_flight"] == in_flight
        ended = self.tickets["trained"] + self.tickets["dropped"]
        assert (
            counts.tickets["issued"]
            == self.tickets["issued"]
            == ended + in_flight + counts.tickets["buffered"]
        )
        assert counts.tickets["dropped"] == self.tickets["dropped"]
        assert counts.tokens["received"] == self.tokens["received"]
        assert counts.tokens["trained"] == self.tokens["trained"]
        assert in_flight + counts.tickets["buffered"] <= self.world.policy.slots

    def grant(self) -> None:
        """Give every live generator what it may have, one ticket each in turn."""
        alive = [g for g in self.generators if g.alive]
        self.random.shuffle(alive)
        if self.world.policy.max_lag == 0:  # a whole round at once, to those with the newest weights
            alive = [g for g in alive if g.acked == self.gate.step]
            budget = self.gate.budget(self.gate.version) if alive else 0
            for k in range(budget):
                self.issue(alive[k % len(alive)])
            return
        while True:
            able = [g for g in alive if self.gate.budget(PolicyVersion(0, g.acked)) > 0]
            if not able:
                return
            for generator in able:
                if self.gate.budget(PolicyVersion(0, generator.acked)) > 0:
                    self.issue(generator)

    def issue(self, generator: Generator) -> None:
        ticket_id = self.gate.ledger.next_ticket_id
        admitted = PolicyVersion(0, generator.acked)
        sampling = Sampling(1.0, 8, [0])
        ticket = Ticket(ticket_id, 0, [1], self.world.num_members, sampling, 0, admitted, DEADLINE_S)
        self.gate.issued(ticket, generator.name)
        self.tickets["issued"] += 1
        generator.waiting.append(ticket_id)
        name = generator.name
        self.after(DEADLINE_S, lambda: self.deadline(generator, name, ticket_id))
        self.start(generator)

    def start(self, generator: Generator) -> None:
        """Admit waiting groups to the decode step."""
        while generator.waiting and len(generator.running) < self.world.capacity:
            ticket_id = generator.waiting.pop(0)
            generator.running[ticket_id] = {generator.acked}
            if self.random.random() < self.world.hang:
                continue
            slow = 30.0 if self.random.random() < self.world.straggler else 1.0
            name = generator.name
            took_s = slow * self.random.uniform(*self.world.generate_s)
            self.after(took_s, lambda t=ticket_id, n=name: self.finish(generator, n, t))

    def finish(self, generator: Generator, name: str, ticket_id: int) -> None:
        if generator.name != name or ticket_id not in generator.running:
            return  # it died, or gave the group up, meanwhile
        if self.random.random() < self.world.death:
            self.die(generator)
            return
        steps = generator.running.pop(ticket_id)
        for _ in range(self.world.num_members):
            num_tokens = self.random.randint(1, 8)
            self.gate.ledger.receive(ticket_id, num_tokens)
            self.tokens["received"] += num_tokens
            self.tokens[f"of {ticket_id}"] += num_tokens
        self.gate.arrived(ticket_id)
        if self.random.random() < self.world.zero_variance:
            self.gate.dropped(ticket_id, DropReason.ZERO_VARIANCE)
            self.tickets["dropped"] += 1
        else:
            self.finished[ticket_id] = Finished(
                ticket_id, {0: frozenset(PolicyVersion(0, step) for step in steps)}
            )
        self.start(generator)

    def deadline(self, generator: Generator, name: str, ticket_id: int) -> None:
        if generator.name != name or ticket_id not in (*generator.running, *generator.waiting):
            return
        generator.running.pop(ticket_id, None)
        if ticket_id in generator.waiting:
            generator.waiting.remove(ticket_id)
        self.gate.dropped(ticket_id, DropReason.DEADLINE)
        self.tickets["dropped"] += 1
        self.start(generator)

    def die(self, generator: Generator) -> None:
        held = sorted([*generator.running, *generator.waiting])
        generator.alive = False
        generator.running.clear()
        generator.waiting.clear()
        assert self.gate.lost(generator.name) == held
        self.tickets["dropped"] += len(held)

        def rejoin() -> None:
            index, life = generator.name[1:].split(".")
            generator.name = f"g{index}.{int(life) + 1}"
            generator.alive = True
            generator.acked = self.gate.step  # a joiner gets the newest weights

        self.after(self.random.uniform(1.0, 10.0), rejoin)

    def consume(self, take: list[int]) -> None:
        self.training = True
        self.idle_s += self.now - self.free_since
        for ticket_id in take:
            lag = self.finished.pop(ticket_id).lag(self.gate.step)
            assert 0 <= lag <= self.world.policy.max_lag
            self.lags[lag] += 1
        assert len(take) == self.world.policy.groups_per_step
        self.trained += take
        self.after(self.random.uniform(*self.world.train_s), lambda: self.stepped(take))

    def stepped(self, take: list[int]) -> None:
        step = self.gate.step + 1
        self.gate.trained(take, PolicyVersion(0, step))
        self.training = False
        self.free_since = self.now
        self.tickets["trained"] += len(take)
        self.tokens["trained"] += sum(self.tokens[f"of {ticket_id}"] for ticket_id in take)
        if step % self.world.policy.push_interval == 0:
            for generator in self.generators:
                name = generator.name
                self.after(
                    self.random.uniform(*self.world.push_s), lambda g=generator, n=name: self.ack(g, n, step)
                )

    def ack(self, generator: Generator, name: str, step: int) -> None:
        """The push is applied between two decode steps; groups in flight go on with the new weights."""
        if generator.name == name and step > generator.acked:
            generator.acked = step
            for steps in generator.running.values():
                steps.add(step)


def random_world(seed: int, kind: type[FreePolicy] | None = None) -> World:
    rng = random.Random(seed)
    groups, steps, window = rng.randint(1, 5), rng.randint(1, 5), rng.choice([1, 1, 2, 3, 5, 8, 13])
    slots = rng.choice([None, None, groups + rng.randint(0, 2 * groups)])
    interval = rng.randint(1, steps)
    if kind is None:
        max_lag = steps - 1 - (-(window - 1) // groups)  # slots for at least so many steps
        policy: StalenessPolicy = WindowPolicy(max_lag, groups, window, interval, slots)
    else:
        policy = kind(steps - 1, groups, interval, slots)
    return World(
        policy=policy,
        num_members=rng.randint(1, 3),
        num_generators=rng.randint(1, 4),
        capacity=rng.randint(1, 8),
        generate_s=rng.choice([(0.01, 0.1), (0.5, 2.0), (0.1, 10.0)]),
        straggler=rng.choice([0.0, 0.05, 0.2]),
        hang=rng.choice([0.0, 0.0, 0.02]),
        train_s=rng.choice([(0.01, 0.02), (0.5, 2.0), (5.0, 9.0)]),
        push_s=rng.choice([(0.0, 0.0), (0.0, 0.5), (1.0, 8.0)]),
        death=rng.choice([0.0, 0.0, 0.05]),
        zero_variance=rng.choice([0.0, 0.3, 0.6]),
        num_steps=rng.randint(6, 12),
    )


@pytest.mark.parametrize("chunk", range(10))
def test_no_token_above_max_lag_in_1000_random_schedules(chunk: int) -> None:
    """Also: the books balance at every event, no ticket is trained twice, and no run stops early."""
    for seed in range(100 * chunk, 100 * chunk + 100):
        simulation = Simulation(random_world(seed), seed).run()
        assert len(set(simulation.trained)) == len(simulation.trained)
        assert max(simulation.lags) <= simulation.world.policy.max_lag


@pytest.mark.parametrize("kind", [CapacityPolicy, DropPolicy, WaitPolicy])
def test_every_policy_keeps_max_lag_at_consumption(kind: type[FreePolicy]) -> None:
    """And `wait` wastes nothing, although it lets groups overtake each other without a window."""
    stale = 0
    for seed in range(250):
        simulation = Simulation(random_world(seed, kind), seed).run()
        assert max(simulation.lags) <= simulation.world.policy.max_lag
        stale += simulation.tickets["stale"]
    assert (stale == 0) == (kind is WaitPolicy)


def test_a_straggler_is_dropped_by_one_policy_waited_for_by_another_and_overtaken_by_neither_beyond_max_lag() -> (
    None
):
    outcomes: dict[str, tuple[int, float]] = {}
    for kind in (CapacityPolicy, DropPolicy, WaitPolicy):
        world = World(
            kind(2, 4), capacity=8, generate_s=(0.4, 0.5), straggler=0.05, train_s=(0.5, 0.5), num_steps=200
        )
        simulation = Simulation(world, seed=3).run()
        assert max(simulation.lags) <= 2
        outcomes[kind.name] = (simulation.tickets["stale"], simulation.idle_s / simulation.now)
    assert outcomes["wait"][0] == 0 < outcomes["drop"][0]
    assert outcomes["wait"][1] > outcomes["drop"][1] + 0.2  # it pays in idle time what the other pays in work


def test_slots_that_do_not_wait_for_acks_cost_stale_groups() -> None:
    """A generator that outruns the learner, nobody straggles: `drop` starts groups on weights that a push is
    about to replace, and more slots make it worse; a slot that returns with the ack wastes nothing.
    """
    stale: list[int] = []
    for policy in (CapacityPolicy(1, 4), DropPolicy(1, 4), DropPolicy(1, 4, slots=24)):
        world = World(policy, capacity=64, generate_s=(0.01, 0.02), train_s=(1.0, 1.0), num_steps=100)
        simulation = Simulation(world, seed=0).run()
        assert max(simulation.lags) <= 1
        stale.append(simulation.tickets["stale"])
    assert stale[0] == 0 < stale[1] < stale[2]


@pytest.mark.parametrize("num_generators", [1, 2, 3, 8])
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_steady_progress_for_every_number_of_replicas(num_generators: int, groups: int, max_lag: int) -> None:
    for num_members in (1, 2, 4):
        policy = WindowPolicy(max_lag, groups)
        assert policy.budget(0, 0, 0, 0, {}) >= groups  # never a capacity of 0 with nothing in flight
        simulation = Simulation(
            World(policy, num_members, num_generators, num_steps=50), seed=num_members
        ).run()
        assert len(simulation.trained) >= 50 * groups


def test_a_learner_ten_times_faster_waits_and_never_uses_a_group_twice() -> None:
    policy = WindowPolicy(2, 5)
    fast = World(policy, 2, 1, capacity=2, generate_s=(1.0, 1.0), train_s=(0.2, 0.3), num_steps=2000)
    simulation = Simulation(fast, seed=0).run()
    assert len(simulation.trained) == len(set(simulation.trained)) == 10_000
    assert simulation.idle_s > 0.8 * simulation.now
    assert max(simulation.lags) <= 2


def test_a_fast_generator_reaches_the_bound_and_throws_nothing_away() -> None:
    """Generator pressure with stragglers: measured max lag equals max_lag, and no group is stale."""
    for max_lag in (1, 2, 4):
        world = World(
            WindowPolicy(max_lag, 4),
            capacity=8,
            generate_s=(0.1, 0.2),
            straggler=0.1,
            train_s=(1.0, 1.0),
            num_steps=300,
        )
        simulation = Simulation(world, seed=1).run()
        assert max(simulation.lags) == max_lag == world.policy.reachable_lag()
        assert simulation.gate.counts().dropped == {}


def test_a_request_that_never_returns_is_timed_out_and_the_run_goes_on() -> None:
    world = World(WindowPolicy(2, 2), hang=0.1, num_steps=60)
    simulation = Simulation(world, seed=5).run()
    dropped = simulation.gate.counts().dropped
    assert set(dropped) == {"deadline"}
    assert dropped["deadline"] >= 5


def test_slots_of_tasks_that_die_come_back() -> None:
    """Deaths take many tickets with them: every one is counted, and the outstanding ones stay the slots'
    number.
    """
    world = World(WindowPolicy(4, 8), num_generators=3, capacity=3, death=0.03, num_steps=100)
    simulation = Simulation(world, seed=11).run()
    counts = simulation.gate.counts()
    assert counts.dropped["generator_lost"] > 20
    assert counts.tickets["in_flight"] + counts.tickets["buffered"] <= world.policy.slots
