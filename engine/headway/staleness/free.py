"""Policies that train any finished group: `capacity`, `drop` and `wait`. Pure, like all policies.

    P   groups per optimizer step        S   max_lag, in optimizer steps
    v   step of the learner's weights    a   step that a generator has acked
    K   optimizer steps per push

A batch is the P finished groups admitted for the oldest weights. For max_lag = 0 all three are the synchronous
loop: tickets go out in whole rounds, to generators that have acked v.

    capacity   accepted + running <= (S + a + 1) P, accepted = trained + buffered. Bounds the sum of the lags, not
               each one: a straggler is overtaken without limit, and dropped as stale when it comes.
    drop       any number of slots, back as soon as a group ends; what is too old when a batch is chosen is dropped
               and its prompt issued anew.
    wait       no group is ever too old: a batch is held back while it would leave one behind that the following
               steps cannot take in time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Self

from headway.errors import ConfigError
from headway.staleness.policy import UNBOUNDED, range_faults, replaced, too_few_slots


class FreePolicy:
    """What the three share; `name` and `bounded` say which one it is.

    Attributes:
        max_lag, groups_per_step, push_interval: S, P, K.
        asked_slots: as given; slots: resolved.
        window: UNBOUNDED.
    """

    name: str = ""
    bounded: bool = False

    def __init__(
        self, max_lag: int, groups_per_step: int, push_interval: int = 1, slots: int | None = None
    ) -> None:
        """Check and resolve.

        Args:
            max_lag: >= 0; 0 is the synchronous loop.
            groups_per_step: >= 1.
            push_interval: >= 1, at most max_lag + 1.
            slots: >= P; None: (S + 1) P.

        Raises:
            ConfigError: an impossible combination; the message names the nearest valid ones.
        """
        self.max_lag: Final = max_lag
        self.groups_per_step: Final = groups_per_step
        self.push_interval: Final = push_interval
        self.asked_slots: Final = slots
        self.window: Final = UNBOUNDED
        faults = range_faults(max_lag, groups_per_step, 1, push_interval) or self._combination_faults()
        if faults:
            raise ConfigError(faults)
        self.slots: Final = self._resolve_slots((max_lag + 1) * groups_per_step)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(max_lag={self.max_lag}, groups_per_step={self.groups_per_step}, "
            f"push_interval={self.push_interval}, slots={self.slots})"
        )

    def budget(
        self, step: int, acked_step: int, in_flight: int, buffered: int, admitted: Mapping[int, int]
    ) -> int:
        """See StalenessPolicy. Nothing for weights whose tokens would be too old at once."""
        del admitted
        if acked_step < step - self.max_lag or (self.max_lag == 0 and in_flight > 0):
            return 0
        return max(0, self.slots - in_flight - buffered)

    def select(
        self, step: int, finished: Collection[int], admitted: Mapping[int, int], width: int | None = None
    ) -> list[int]:
        """See StalenessPolicy; `width` does not apply."""
        del step, width
        return sorted(finished, key=lambda index: (admitted[index], index))[: self.groups_per_step]

    def changed(
        self,
        *,
        max_lag: int | None = None,
        window: int | None = None,
        slots: int | None = None,
        push_interval: int | None = None,
    ) -> Self:
        """See StalenessPolicy."""
        if window:
            raise ConfigError([("staleness.window", f"policy {self.name!r} has no window; leave it at 0")])
        return type(self)(
            self.max_lag if max_lag is None else max_lag,
            self.groups_per_step,
            self.push_interval if push_interval is None else push_interval,
            replaced(self.asked_slots, slots),
        )

    def unreachable(self, concurrent_groups: int | None = None) -> str:
        """See StalenessPolicy. Nothing is overtaken when every batch needs all slots, or one group runs at a time."""
        alone = concurrent_groups is not None and concurrent_groups < 2
        if self.max_lag == 0 or (self.slots > self.groups_per_step and not alone):
            return ""
        cause = (
            "generators that decode one group at once never overtake"
            if alone
            else f"staleness.slots = {self.slots} is one batch, so each waits for all of them"
        )
        return f"the bound cannot be reached: staleness.max_lag = {self.max_lag}, but {cause}"

    def _resolve_slots(self, most: int) -> int:
        return most if self.asked_slots is None else min(self.asked_slots, most)

    def _combination_faults(self) -> list[tuple[str, str]]:
        faults = too_few_slots(self.asked_slots, self.groups_per_step)
        if self.push_interval > self.max_lag + 1:
            message = (
                f"{self.push_interval} steps between pushes make every sample older than max_lag = {self.max_lag}; "
                f"use at most {self.max_lag + 1}, or max_lag >= {self.push_interval - 1}"
            )
            faults.append(("push.interval", message))
        return faults


class CapacityPolicy(FreePolicy):
    """accepted + running <= (S + a + 1) P. With v P groups trained, (S + 1 + a - v) P tickets are outstanding."""

    name = "capacity"

    def budget(
        self, step: int, acked_step: int, in_flight: int, buffered: int, admitted: Mapping[int, int]
    ) -> int:
        """See StalenessPolicy."""
        room = (self.max_lag + 1 + acked_step - step) * self.groups_per_step - in_flight - buffered
        return max(0, min(room, super().budget(step, acked_step, in_flight, buffered, admitted)))


class DropPolicy(FreePolicy):
    """Any number of slots; more of them than (S + 1) P let generators run ahead at the price of stale groups."""

    name = "drop"

    def _resolve_slots(self, most: int) -> int:
        return most if self.asked_slots is None else self.asked_slots


class WaitPolicy(FreePolicy):
    """Holds the learner for whoever would become too old.

    Invariant at every step v, for every j: the outstanding tickets admitted for weights of step j or older are at
    most (j + S - v + 1) P, as many as the steps v .. j + S can train. `budget` keeps it when tickets go out,
    `select` when a step takes P of them; so a group admitted for step j is trained at j + S at the latest.
    """

    name = "wait"
    bounded = True

    def budget(
        self, step: int, acked_step: int, in_flight: int, buffered: int, admitted: Mapping[int, int]
    ) -> int:
        """See StalenessPolicy."""
        budget = super().budget(step, acked_step, in_flight, buffered, admitted)
        for level in range(acked_step, step + 1) if budget else ():
            held = sum(1 for at in admitted.values() if at <= level)
            budget = min(budget, self._room(level, step) - held)
        return max(0, budget)

    def select(
        self, step: int, finished: Collection[int], admitted: Mapping[int, int], width: int | None = None
    ) -> list[int]:
        """See StalenessPolicy: the groups of the oldest weights, or none while the step must wait for one."""
        chosen = super().select(step, finished, admitted, width)
        # Only after max_lag was lowered are there tickets older than the bound; nothing waits for those.
        levels = [at for at in admitted.values() if at >= step - self.max_lag]
        for level in set(levels):
            held = sum(1 for at in levels if at <= level)
            taken = sum(1 for index in chosen if step - self.max_lag <= admitted[index] <= level)
            must = min(held - self._room(level, step + 1), self.groups_per_step)
            if taken < must:
                return []
        return chosen

    def _room(self, level: int, step: int) -> int:
        """Groups that the steps step .. level + S can train."""
        return (level + self.max_lag - step + 1) * self.groups_per_step
