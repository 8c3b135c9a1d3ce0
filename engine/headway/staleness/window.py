"""The window policy: how many tickets may go out, and which finished groups a step may train.

Pure: no clock, no I/O, no state; the gate hands in the counts. docs/staleness.md proves the bound.

    P   groups per optimizer step          S   max_lag, the guaranteed bound, in optimizer steps
    W   window: how far a group may be     K   optimizer steps per push
        ahead of the oldest unended one

Admission: (S + 1) * P - (W - 1) slots: what overtakes a group and what it waits behind share one bound. A slot
holds one outstanding ticket (in flight or buffered); a trained ticket's slot returns, for one generator, when that
generator has acked the weights of the step that trained it; a dropped ticket's slot returns at once. Counting slots
instead of "all tickets ever" makes a resume continue where it was: nothing is counted from zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from headway.config.derived import default_window, lag_for_interval, windowed_slots
from headway.errors import ConfigError
from headway.staleness.policy import range_faults, replaced, too_few_slots


class WindowPolicy:
    """An immutable choice of (max_lag, P, W, K, slots); every token trained under it has lag <= max_lag.

    Attributes:
        max_lag: S, the bound.
        groups_per_step: P.
        window: W, resolved.
        push_interval: K.
        slots: most tickets outstanding, resolved; at most (S + 1) * P - (W - 1).
    """

    name: str = "window"
    bounded: bool = True

    def __init__(
        self,
        max_lag: int,
        groups_per_step: int,
        window: int | None = None,
        push_interval: int = 1,
        slots: int | None = None,
    ) -> None:
        """Check and resolve.

        Args:
            max_lag: >= 0; 0 is the synchronous loop.
            groups_per_step: >= 1.
            window: >= 1; None: headway.config.derived.default_window.
            push_interval: >= 1, at most as many as the slots hold whole steps.
            slots: >= P; None: (S + 1) * P - (W - 1), which is also the most that takes effect.

        Raises:
            ConfigError: an impossible combination; the message names the nearest valid ones.
        """
        self.max_lag: Final = max_lag
        self.groups_per_step: Final = groups_per_step
        self.push_interval: Final = push_interval
        self.asked_window: Final = window
        self.asked_slots: Final = slots
        self.window: Final = default_window(max_lag, groups_per_step) if window is None else window
        faults = range_faults(max_lag, groups_per_step, self.window, push_interval)
        if faults:
            raise ConfigError(faults)
        self._most_slots: Final = windowed_slots(max_lag, groups_per_step, self.window)
        faults = self._combination_faults()
        if faults:
            raise ConfigError(faults)
        self.slots: Final = self._most_slots if slots is None else min(slots, self._most_slots)

    def __repr__(self) -> str:
        return (
            f"WindowPolicy(max_lag={self.max_lag}, groups_per_step={self.groups_per_step}, "
            f"window={self.window}, push_interval={self.push_interval}, slots={self.slots})"
        )

    def budget(
        self, step: int, acked_step: int, in_flight: int, buffered: int, admitted: Mapping[int, int]
    ) -> int:
        """How many tickets a generator may be given now.

        For max_lag = 0 tickets go out in whole rounds: none while any is in flight, so what a step trains
        does not depend on the order in which groups finish. The caller grants all of the budget as one
        message.

        Args:
            step: of the learner's weights.
            acked_step: of the weights that this generator has in force.
            in_flight, buffered: outstanding tickets, unfinished and finished.
            admitted: of no account here.
        """
        del admitted
        if self.max_lag == 0 and in_flight > 0:
            return 0
        outstanding = in_flight + buffered
        unreturned = (step - acked_step) * self.groups_per_step
        free = self._most_slots - outstanding - unreturned
        return max(0, min(free, self.slots - outstanding))

    def select(
        self, step: int, finished: Collection[int], admitted: Mapping[int, int], width: int | None = None
    ) -> list[int]:
        """The groups of the next batch: finished ones inside the window, oldest first, at most P.

        The window's foot is the oldest index neither ended nor already chosen for this batch. Fewer than P in
        the answer mean that the batch is not complete yet.

        Args:
            step: of no account here.
            finished: admission indices of the finished groups, each also in `admitted`.
            admitted: its keys are the admission indices of every outstanding ticket.
            width: a narrower W while older tickets need it (headway.staleness.gate).
        """
        del step
        width = self.window if width is None else min(width, self.window)
        open_indices = sorted(admitted)
        chosen: list[int] = []
        foot = 0
        for index in sorted(finished):
            while foot < len(chosen) and chosen[foot] == open_indices[foot]:
                foot += 1
            if index >= open_indices[foot] + width or len(chosen) == self.groups_per_step:
                break
            chosen.append(index)
        return chosen

    def changed(
        self,
        *,
        max_lag: int | None = None,
        window: int | None = None,
        slots: int | None = None,
        push_interval: int | None = None,
    ) -> WindowPolicy:
        """This policy with some values replaced; a window or slots left to their default (0: go back to it)
        follow max_lag.

        Raises:
            ConfigError: the combination is impossible; this policy stays as it is.
        """
        return WindowPolicy(
            self.max_lag if max_lag is None else max_lag,
            self.groups_per_step,
            replaced(self.asked_window, window),
            self.push_interval if push_interval is None else push_interval,
            replaced(self.asked_slots, slots),
        )

    def reachable_lag(self, concurrent_groups: int | None = None) -> int:
        """The most lag that a group can see when weights are acked at once and generators outrun the learner.

        A group waits for at most slots - 1 older ones and is overtaken by at most W - 1 newer ones; nothing
        overtakes when a batch needs every slot, or when generators run one group at a time.

        Args:
            concurrent_groups: groups that all generators together decode at once; None: two or more.
        """
        overtaking = self.window - 1
        if self.slots <= self.groups_per_step or (concurrent_groups is not None and concurrent_groups < 2):
            overtaking = 0
        return min(self.max_lag, (self.slots - 1 + overtaking) // self.groups_per_step)

    def unreachable(self, concurrent_groups: int | None = None) -> str:
        """A sentence for start-up when the bound cannot be reached; "" when it can."""
        reachable = self.reachable_lag(concurrent_groups)
        if reachable >= self.max_lag:
            return ""
        if self._most_slots == self.groups_per_step:
            cause = (
                f"staleness.window = {self.window} leaves slots for one step only, and every batch needs all "
                f"of them; a window of at most {self.groups_per_step * self.max_lag} would reach it"
            )
        elif self.slots < self._most_slots:
            cause = (
                f"staleness.slots = {self.slots} limits lag to {reachable}; {self._most_slots} would reach it"
            )
        else:
            cause = f"generators that decode {concurrent_groups} group at once limit lag to {reachable}"
        return f"the bound cannot be reached: staleness.max_lag = {self.max_lag}, but {cause}"

    def _combination_faults(self) -> list[tuple[str, str]]:
        faults: list[tuple[str, str]] = []
        groups, whole_steps = self.groups_per_step, self._most_slots // self.groups_per_step
        if self._most_slots < groups:
            overtaken = -(-(self.window - 1) // groups)
            faults.append(
                (
                    "staleness.window",
                    f"a window of {self.window} lets a group be overtaken for {overtaken} steps, more than "
                    f"max_lag = {self.max_lag}; use a window of at most {1 + groups * self.max_lag}, or max_lag >= "
                    f"{overtaken}",
                )
            )
        elif self.push_interval > whole_steps:
            faults.append(
                (
                    "push.interval",
                    f"{self.push_interval} steps between pushes would use up the {self._most_slots} slots, "
                    f"{whole_steps} steps' worth, and stop for ever; use at most {whole_steps}, or max_lag >= "
                    f"{lag_for_interval(self.push_interval, groups, self.window)} with this window",
                )
            )
        return faults + too_few_slots(self.asked_slots, groups)
