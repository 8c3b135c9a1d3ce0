"""The run of a scenario on a virtual clock, event by event, with the engine's own staleness policy deciding.

    tickets go out as policy.budget says -> members decode (headway.planner.fleet) -> rewards -> finished groups
    -> policy.select -> an optimizer step -> a push, which generators put in force between two decode steps

A heap of events is the whole machinery (docs/adr/0011).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from headway.errors import ConfigError
from headway.planner.fleet import NEVER, Ended, SimulatedGenerator
from headway.planner.forecast import Forecast
from headway.planner.scenario import Scenario
from headway.planner.tally import Tally
from headway.staleness import Finished
from headway.staleness.policy import UNBOUNDED
from headway.staleness.unit import judge
from headway.types import DropReason, PolicyVersion


@dataclass
class _Group:
    """A ticket that is out, or finished."""

    generator: SimulatedGenerator
    waiting_for: int
    rewarded_s: float = 0.0
    members: list[Ended] = field(default_factory=list[Ended])
    tokens: int = 0


class Simulation:
    """One run.

    Args:
        seed: of the lengths, latencies and losses.
    """

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self._scenario = scenario
        self._rates = scenario.rates
        self._policy = scenario.policy
        self._random = random.Random(seed)
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        decode_s = [max(1e-9, scenario.rates.decode(count)) for count in range(scenario.max_running + 1)]
        self._generators = [
            SimulatedGenerator(index, scenario, decode_s) for index in range(scenario.replicas)
        ]
        self._scheduled = [NEVER] * scenario.replicas
        self._by_held: list[tuple[int, int]] = [(0, index) for index in range(scenario.replicas)]
        self._out: dict[int, _Group] = {}
        self._finished: dict[int, _Group] = {}
        self._admitted: dict[int, int] = {}
        self._next_ticket = 0
        self._step = 0
        self._busy = False
        self._dirty = True
        self._foot, self._missing = -1, 0  # of the window when it last held the learner back
        self._free_since_s = 0.0
        self._tally = Tally()

    def run(self) -> Forecast:
        """Until the last optimizer step.

        Raises:
            ConfigError: the run stands still for ever.
        """
        if self._scenario.losses_per_hour:
            for generator in self._generators:
                self._doom(generator)
        self._settle()
        while self._step < self._scenario.steps:
            if not self._events:
                raise ConfigError(
                    [("staleness", f"the run stands still at step {self._step}: {self._policy!r}")]
                )
            self._now = self._events[0][0]
            while self._events and self._events[0][0] <= self._now:
                heapq.heappop(self._events)[2]()
            self._settle()
        for generator in self._generators:
            generator.catch_up(self._tally.ended_s)
        return self._tally.forecast(self._scenario, self._generators)

    # Events ---------------------------------------------------------------------------------------------------

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, action))

    def _settle(self) -> None:
        """What the learner does until nothing changes any more at this moment."""
        while self._dirty:
            self._dirty = False
            self._grant()
            if not self._busy:
                self._take()

    def _watch(self, generator: SimulatedGenerator) -> None:
        """Have it woken when it wants to be; what was scheduled for later is passed over."""
        wake_s = generator.wake_s
        if wake_s < NEVER and wake_s != self._scheduled[generator.index]:
            self._scheduled[generator.index] = wake_s
            self._at(wake_s, lambda: self._wake(generator, wake_s))

    def _wake(self, generator: SimulatedGenerator, wake_s: float) -> None:
        if generator.wake_s != wake_s:
            return
        self._scheduled[generator.index] = NEVER
        serving = generator.serving
        for member in generator.wake(self._now):
            self._ended(member)
        if generator.serving != serving:
            life, step = generator.life, generator.serving
            self._at(generator.in_force_s, lambda: self._acked(generator, life, step))
        self._watch(generator)

    def _acked(self, generator: SimulatedGenerator, life: int, step: int) -> None:
        if generator.life == life:
            generator.acked = max(generator.acked, step)
            self._dirty = True

    def _ended(self, member: Ended) -> None:
        group = self._out[member.ticket_id]
        group.members.append(member)
        group.tokens += member.tokens
        group.waiting_for -= 1
        reward = self._rates.reward
        reward_s = self._random.choice(reward) if len(reward) > 1 else reward[0]
        scored_s = group.generator.score(self._now, reward_s)
        group.rewarded_s = max(group.rewarded_s, group.generator.turn_end(scored_s))
        if not group.waiting_for:
            self._at(group.rewarded_s, lambda: self._arrived(member.ticket_id, group))

    def _arrived(self, ticket_id: int, group: _Group) -> None:
        if self._out.get(ticket_id) is not group:
            return  # lost with its generator
        del self._out[ticket_id]
        group.generator.held.discard(ticket_id)
        heapq.heappush(self._by_held, (len(group.generator.held), group.generator.index))
        self._dirty = True
        self._missing -= ticket_id < self._foot + self._policy.window
        if self._scenario.filter_flat and self._random.random() < self._rates.zero_variance:
            self._drop(ticket_id, DropReason.ZERO_VARIANCE)
        else:
            self._finished[ticket_id] = group

    def _drop(self, ticket_id: int, reason: DropReason) -> None:
        del self._admitted[ticket_id]
        self._tally.tickets[reason.value] += 1
        self._dirty = True

    # Tickets --------------------------------------------------------------------------------------------------

    def _grant(self) -> None:
        """What the learner's desk does: whoever holds least is served first, up to a fair share of the slots."""
        left = self._scenario.steps - self._step
        wanted = left * self._policy.groups_per_step - len(self._admitted)
        if self._policy.max_lag == 0:
            self._grant_round(wanted)
            return
        aside: list[tuple[int, int]] = []
        issued = rank = 0
        newest = self._budget(self._step)
        while self._by_held and issued < min(wanted, newest):
            held, index = heapq.heappop(self._by_held)
            generator = self._generators[index]
            if not generator.alive or held != len(generator.held):
                continue
            share = self._share(rank)
            rank += 1
            if share <= held:  # and so for everybody after it
                aside.append((held, index))
                break
            budget = newest if generator.acked == self._step else self._budget(generator.acked)
            for _ in range(min(wanted - issued, share - held, budget - issued)):
                self._issue(generator)
                issued += 1
            aside.append((len(generator.held), index))
        for entry in aside:
            heapq.heappush(self._by_held, entry)

    def _grant_round(self, wanted: int) -> None:
        """A synchronous run grants whole rounds, when everybody has the weights."""
        if any(generator.acked != self._step or not generator.alive for generator in self._generators):
            return
        left = min(wanted, self._budget(self._step))
        for rank, generator in enumerate(self._generators):
            for _ in range(min(left, self._share(rank))):
                self._issue(generator)
                left -= 1

    def _share(self, rank: int) -> int:
        return -((rank - self._policy.slots) // self._scenario.replicas)

    def _budget(self, acked: int) -> int:
        buffered = len(self._admitted) - len(self._out)  # those in training keep their slots until it is over
        return self._policy.budget(self._step, acked, len(self._out), buffered, self._admitted)

    def _issue(self, generator: SimulatedGenerator) -> None:
        ticket_id, self._next_ticket = self._next_ticket, self._next_ticket + 1
        groups = self._rates.groups
        lengths = groups[ticket_id % len(groups)] if self._scenario.in_order else self._random.choice(groups)
        if len(lengths) != self._scenario.samples:
            lengths = self._random.choices(lengths, k=self._scenario.samples)
        self._tally.tickets["issued"] += 1
        self._admitted[ticket_id] = generator.acked
        self._out[ticket_id] = _Group(generator, len(lengths))
        generator.grant(self._now, ticket_id, lengths)
        self._watch(generator)

    # The learner ----------------------------------------------------------------------------------------------

    def _take(self) -> None:
        if len(self._finished) < self._policy.groups_per_step or self._is_held_back():
            return
        if not self._policy.bounded:
            self._drop_stale()
        chosen = self._policy.select(self._step, self._finished, self._admitted)
        self._missing = self._policy.groups_per_step - len(chosen)
        if self._missing:
            self._foot = min(self._out, default=-1)
            return
        groups = [self._finished.pop(ticket_id) for ticket_id in chosen]
        oldest = self._step - self._policy.max_lag
        for group in groups:
            self._tally.consumed(group.members, self._step, oldest, self._now - group.rewarded_s)
        self._set_busy(True)
        self._tally.idle_s += self._now - self._free_since_s
        forwarded = sum(group.tokens for group in groups) + len(groups) * self._rates.prompt_tokens
        train_s = self._rates.train(forwarded / self._scenario.ranks)
        if self._scenario.beside and any(generator.wake_s < NEVER for generator in self._generators):
            train_s *= self._rates.train_beside
        self._tally.train_s += train_s
        self._at(self._now + train_s, lambda: self._stepped(chosen))

    def _is_held_back(self) -> bool:
        """Whether nothing has come that a policy with a window could take: asking it costs a sort of all tickets."""
        windowed = self._policy.window < UNBOUNDED
        return windowed and self._missing > 0 and self._foot in self._out

    def _drop_stale(self) -> None:
        for ticket_id, group in list(self._finished.items()):
            members = {
                number: frozenset(PolicyVersion(0, step) for step, _ in member.spans)
                for number, member in enumerate(group.members)
            }
            finished = Finished(ticket_id, members)
            cut = judge(finished, self._step, self._policy.max_lag, self._scenario.unit, lambda _: False)
            if cut.dropped is not None:
                del self._finished[ticket_id]
                self._drop(ticket_id, cut.dropped)
            elif cut.members:
                group.members = [
                    each for number, each in enumerate(group.members) if number not in cut.members
                ]

    def _stepped(self, chosen: list[int]) -> None:
        self._step += 1
        self._tally.steps, self._tally.ended_s = self._step, self._now
        if self._step == self._scenario.warmup:
            self._forget()
        for ticket_id in chosen:
            del self._admitted[ticket_id]
        self._dirty = True
        publish_s = 0.0
        if self._step % self._policy.push_interval == 0:
            publish_s = self._rates.publish(self._rates.push_bytes)
            ready_s = self._now + publish_s + self._stage_s()
            step = self._step
            self._at(ready_s, lambda: self._staged(step))
        self._tally.push_s += publish_s
        self._tally.turn_s += self._rates.turn
        self._at(self._now + publish_s + self._rates.turn, self._free)

    def _forget(self) -> None:
        """The warm-up is over: rates, shares and lags begin here."""
        self._tally.forget(self._now)
        for generator in self._generators:
            generator.catch_up(self._now)
            generator.work_s = generator.push_s = 0.0

    def _stage_s(self) -> float:
        link = self._scenario.link_bytes_per_s
        return self._rates.push_bytes / link if link else self._rates.stage(self._rates.push_bytes)

    def _staged(self, step: int) -> None:
        for generator in self._generators:
            if generator.alive:
                generator.stage(self._now, step)
                self._watch(generator)

    def _free(self) -> None:
        self._free_since_s = self._now
        self._set_busy(False)
        self._dirty = True

    def _set_busy(self, busy: bool) -> None:
        self._busy = busy
        if self._scenario.beside and self._rates.decode_beside != 1.0:
            for generator in self._generators:
                generator.slow_down(self._now, self._rates.decode_beside if busy else 1.0)
                self._watch(generator)

    # Losses ---------------------------------------------------------------------------------------------------

    def _doom(self, generator: SimulatedGenerator) -> None:
        delay_s = self._random.expovariate(self._scenario.losses_per_hour / 3600)
        self._at(self._now + delay_s, lambda: self._lose(generator))

    def _lose(self, generator: SimulatedGenerator) -> None:
        for ticket_id in generator.lose(self._now):
            del self._out[ticket_id]
            self._drop(ticket_id, DropReason.GENERATOR_LOST)
        self._at(self._now + self._scenario.restart_s, lambda: self._rejoin(generator))

    def _rejoin(self, generator: SimulatedGenerator) -> None:
        pushed = self._step - self._step % self._policy.push_interval
        generator.rejoin(self._now, pushed)
        heapq.heappush(self._by_held, (0, generator.index))
        self._dirty = True
        self._doom(generator)


def simulate(scenario: Scenario, seed: int = 0) -> Forecast:
    """One run of the scenario; see `Simulation.run`."""
    return Simulation(scenario, seed).run()
