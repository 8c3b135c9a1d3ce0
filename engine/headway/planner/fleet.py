"""A generator on the virtual clock: sequences decode side by side, and everything happens between two steps.

Each of its running sequences gains one token per decode step, and a step's length depends on how many there are. So
one counter of steps and a heap of the counts at which sequences end are all that is needed, whatever their lengths.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headway.planner.scenario import Scenario

NEVER = math.inf
EPSILON = 1e-6  # of a step: what rounding may take from a whole number of them


@dataclass(frozen=True)
class Ended:
    """A member that is sampled to its end.

    Attributes:
        ticket_id: its ticket; tokens: sampled; spans: (step of the weights, tokens sampled with them).
    """

    ticket_id: int
    tokens: int
    spans: list[tuple[int, int]]


class SimulatedGenerator:
    """One generator.

    Attributes:
        serving: step of the weights in force, since in_force_s; acked: the newest that the learner knows of.
        alive: it takes tickets.
        held: tickets that the learner has not seen the end of. work_s, push_s: decoding, and standing still for a push.
        wake_s: when `wake` must be called next. life: grows when it is lost, so that what it had scheduled is void.
    """

    def __init__(self, index: int, scenario: Scenario, decode_s: Sequence[float]) -> None:
        """
        Args:
            decode_s: seconds of a decode step by running sequences, 0 to scenario.max_running.
        """
        self.index = index
        self.serving = self.acked = 0
        self.in_force_s = 0.0
        self.alive = True
        self.life = 0
        self.held: set[int] = set()
        self.work_s = self.push_s = 0.0
        self.wake_s = NEVER
        self._scenario = scenario
        self._rates = scenario.rates
        self._decode_s = decode_s
        self._step_s = decode_s[0]
        self._beside = 1.0
        self._waiting: deque[tuple[int, list[int]]] = deque()
        self._running: list[tuple[int, int, int]] = []  # (count at its end, count at its start, ticket)
        self._count = 0
        self._since_s = 0.0  # the next decode step begins then
        self._switches: tuple[list[int], list[int]] = ([0], [0])  # counts, and the weights from there on
        self._staged: int | None = None
        self._workers_free_s = [0.0] * scenario.reward_workers

    def grant(self, now: float, ticket_id: int, lengths: list[int]) -> None:
        """A ticket; its members join at the next step for which there is room for all of them."""
        self.held.add(ticket_id)
        self._waiting.append((ticket_id, lengths))
        self._look_up(now)

    def stage(self, now: float, step: int) -> None:
        """Weights of `step` are ready beside what is served; of no use to one that came back with newer ones."""
        if step <= self.serving:
            return
        self._staged = step
        self._look_up(now)

    def slow_down(self, now: float, factor: float) -> None:
        """Steps take `factor` times as long from here on."""
        if factor != self._beside:
            self._advance(now)
            self._beside = factor
            self._schedule()
            if self._waiting or self._staged is not None:
                self._look_up(now)

    def lose(self, now: float) -> set[int]:
        """It dies; the tickets that it held."""
        self._advance(now)
        lost, self.held = self.held, set()
        self._waiting.clear()
        self._running.clear()
        self.alive, self._staged, self.wake_s = False, None, NEVER
        self._workers_free_s = [now] * len(self._workers_free_s)
        self.life += 1
        return lost

    def rejoin(self, now: float, step: int) -> None:
        """Back, with the newest weights."""
        self.alive, self._since_s = True, now
        self.serving = self.acked = step
        self._switches = ([self._count], [step])

    def turn_end(self, ready_s: float) -> float:
        """When the learner is sent a reward that is ready at `ready_s`: trajectories leave after a decode step."""
        if not self._running:
            return max(ready_s, self._since_s)
        steps = math.ceil((ready_s - self._since_s) / self._step_s - EPSILON)
        return self._since_s + max(1, steps) * self._step_s

    def score(self, now: float, reward_s: float) -> float:
        """When the first free reward worker has scored a completion that ends now."""
        begin = max(now, heapq.heappop(self._workers_free_s))
        heapq.heappush(self._workers_free_s, begin + reward_s)
        return begin + reward_s

    def catch_up(self, now: float) -> None:
        """Book the decode steps that have ended by now."""
        self._advance(now)

    def wake(self, now: float) -> list[Ended]:
        """Between two steps: who has ended goes, staged weights come, who waits joins."""
        self._advance(now)
        ended: list[Ended] = []
        while self._running and self._running[0][0] <= self._count:
            end, start, ticket_id = heapq.heappop(self._running)
            ended.append(Ended(ticket_id, end - start, self._spans(start, end)))
        if self._staged is not None and not (self._scenario.mode == "drain" and self._running):
            self._commit(now)
        if self._staged is None:
            self._admit(now)
        self._schedule()
        return ended

    def _look_up(self, now: float) -> None:
        """Wake at the end of the decode step that is under way."""
        if not self.alive:
            return
        if not self._running:
            self._since_s = max(self._since_s, now)
            self.wake_s = min(self.wake_s, self._since_s)
            return
        begun = max(0, math.ceil((now - self._since_s) / self._step_s - EPSILON))
        self.wake_s = min(self.wake_s, self._since_s + begun * self._step_s)

    def _schedule(self) -> None:
        self._step_s = self._decode_s[len(self._running)] * self._beside
        self.wake_s = NEVER
        if self._running:
            self.wake_s = self._since_s + (self._running[0][0] - self._count) * self._step_s

    def _advance(self, now: float) -> None:
        if not self._running:
            self._since_s = max(self._since_s, now)
            return
        steps = math.floor((now - self._since_s) / self._step_s + EPSILON)
        if steps > 0:
            self._count += steps
            self._since_s += steps * self._step_s
            self.work_s += steps * self._step_s

    def _commit(self, now: float) -> None:
        assert self._staged is not None
        pause_s = self._rates.apply(self._rates.push_bytes)
        if self._running and (self._scenario.recompute or self._scenario.mode == "resume"):
            context = len(self._running) * self._rates.prompt_tokens
            context += sum(self._count - start for _, start, _ in self._running)
            pause_s += self._rates.prefill(context)
        self.push_s += pause_s
        self._since_s = self.in_force_s = max(self._since_s, now) + pause_s
        self.serving, self._staged = self._staged, None
        counts, steps = self._switches
        counts.append(self._count)
        steps.append(self.serving)

    def _admit(self, now: float) -> None:
        """Groups join whole, as in the embedded engine."""
        prompts = 0
        room = self._scenario.max_running - len(self._running)
        while self._waiting and len(self._waiting[0][1]) <= room:
            ticket_id, lengths = self._waiting.popleft()
            prompts += 1
            room -= len(lengths)
            for length in lengths:
                heapq.heappush(self._running, (self._count + length, self._count, ticket_id))
        if prompts:
            prefill_s = self._rates.prefill(prompts * self._rates.prompt_tokens)
            self.work_s += prefill_s
            self._since_s = max(self._since_s, now) + prefill_s

    def _spans(self, start: int, end: int) -> list[tuple[int, int]]:
        counts, steps = self._switches
        at = bisect.bisect_right(counts, start) - 1
        spans: list[tuple[int, int]] = []
        while start < end:
            until = counts[at + 1] if at + 1 < len(counts) else end
            tokens = min(until, end) - start
            if tokens:
                spans.append((steps[at], tokens))
            start += tokens
            at += 1
        return spans
