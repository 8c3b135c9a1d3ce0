"""The seam between the gate and a staleness policy, and what every policy shares.

A policy is an immutable choice of numbers with three answers: how many tickets may go out (`budget`), which
finished groups a step trains (`select`), and what changing a number makes of it (`changed`). Pure: no clock, no
I/O, no state; the gate hands in the counts. docs/staleness.md proves each bound, or says that it is aggregate only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, Self

UNBOUNDED = 2**62


class StalenessPolicy(Protocol):
    """What the gate asks.

    Attributes:
        name: as `staleness.policy` names it.
        max_lag: S, the bound on every trained token's lag, in optimizer steps.
        groups_per_step: P. push_interval: K, optimizer steps per push.
        window: how far past the oldest unended index a group may be taken; UNBOUNDED: any finished group.
        slots: most tickets outstanding.
        bounded: no group that ends can be beyond max_lag, so nothing is generated in vain.
    """

    @property
    def name(self) -> str: ...
    @property
    def max_lag(self) -> int: ...
    @property
    def groups_per_step(self) -> int: ...
    @property
    def push_interval(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def bounded(self) -> bool: ...

    def budget(
        self, step: int, acked_step: int, in_flight: int, buffered: int, admitted: Mapping[int, int]
    ) -> int:
        """How many tickets a generator may be given now, as one message.

        Args:
            step: of the learner's weights.
            acked_step: of the weights that this generator has in force.
            in_flight, buffered: outstanding tickets, unfinished and finished.
            admitted: per outstanding ticket, the acked step that it was issued for.
        """
        ...

    def select(
        self, step: int, finished: Collection[int], admitted: Mapping[int, int], width: int | None = None
    ) -> list[int]:
        """The groups of the next batch, at most P; fewer mean that it is not complete yet.

        Args:
            step: of the weights that will train it.
            finished: ids of the finished groups, each also in `admitted`.
            admitted: per outstanding ticket, the acked step that it was issued for.
            width: a narrower window while older tickets need it (headway.staleness.gate).
        """
        ...

    def changed(
        self,
        *,
        max_lag: int | None = None,
        window: int | None = None,
        slots: int | None = None,
        push_interval: int | None = None,
    ) -> Self:
        """This policy with some numbers replaced; `window` and `slots` of 0 go back to their defaults.

        Raises:
            ConfigError: the combination is impossible; this policy stays as it is.
        """
        ...

    def unreachable(self, concurrent_groups: int | None = None) -> str:
        """A sentence for start-up when no group can reach max_lag; "" when one can.

        Args:
            concurrent_groups: groups that all generators together decode at once; None: two or more.
        """
        ...


def range_faults(
    max_lag: int, groups_per_step: int, window: int, push_interval: int
) -> list[tuple[str, str]]:
    """Numbers out of range, as (key, message)."""
    checks = [
        ("staleness.max_lag", max_lag, 0),
        ("groups_per_step", groups_per_step, 1),
        ("staleness.window", window, 1),
        ("push.interval", push_interval, 1),
    ]
    return [
        (path, f"{value} is out of range; use at least {least}")
        for path, value, least in checks
        if value < least
    ]


def too_few_slots(slots: int | None, groups_per_step: int) -> list[tuple[str, str]]:
    """Slots that never fill a batch, as (key, message)."""
    if slots is None or slots >= groups_per_step:
        return []
    message = f"{slots} slots cannot fill a step of {groups_per_step} groups; use >= {groups_per_step}"
    return [("staleness.slots", message)]


def replaced(asked: int | None, new: int | None) -> int | None:
    """A number that may be left to its default: None keeps what was asked for, 0 asks for the default."""
    if new is None:
        return asked
    return new or None
