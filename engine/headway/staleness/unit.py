"""What of a finished group may still be trained, when some of its tokens are too old.

    trajectory   a member whose oldest token is too old goes, whole
    token        a member goes when its newest token is too old; else its too-old tokens are masked from the loss

In both, a member with a token of weights that a resume rolled back goes. The group is trained on the members that
stay (their rewards are its baseline) if they are all of them, or at least two; else it goes as a whole: one fresh
member alone has no baseline, and those that are fresh are mostly the short ones.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headway.types import DropReason, PolicyVersion

MIN_FRESH = 2


class StalenessUnit(enum.StrEnum):
    """What `staleness.unit` judges: whole trajectories, or tokens."""

    TRAJECTORY = "trajectory"
    TOKEN = "token"


@dataclass(frozen=True)
class Finished:
    """A finished group as the gate sees it.

    Attributes:
        ticket_id: its ticket.
        members: per trajectory of it, the versions that sampled one of its tokens.
    """

    ticket_id: int
    members: Mapping[int, frozenset[PolicyVersion]]

    def lag(self, step: int) -> int:
        """Of the oldest token, when weights of `step` compute its gradient."""
        return step - min(version.step for versions in self.members.values() for version in versions)


@dataclass(frozen=True)
class Cut:
    """What of a group is left out.

    Attributes:
        members: that go, with the reason. oldest_step: tokens of older weights are masked; None: none are.
        dropped: the whole group goes, with this reason.
    """

    members: Mapping[int, DropReason] = field(default_factory=dict[int, DropReason])
    oldest_step: int | None = None
    dropped: DropReason | None = None

    def __bool__(self) -> bool:
        return bool(self.members) or self.oldest_step is not None or self.dropped is not None


def judge(
    group: Finished,
    step: int,
    max_lag: int,
    unit: StalenessUnit,
    abandoned: Callable[[PolicyVersion], bool],
) -> Cut:
    """What of a group goes, when weights of `step` train it.

    Args:
        abandoned: whether a version belongs to steps that a resume rolled back.
    """
    decides = max if unit is StalenessUnit.TOKEN else min
    gone: dict[int, DropReason] = {}
    masks = False
    for member, versions in group.members.items():
        steps = [version.step for version in versions]
        if any(abandoned(version) for version in versions):
            gone[member] = DropReason.ABANDONED_VERSION
        elif step - decides(steps) > max_lag:
            gone[member] = DropReason.STALE
        else:
            masks = masks or step - min(steps) > max_lag
    fresh = len(group.members) - len(gone)
    if gone and fresh < MIN_FRESH:
        reasons = list(gone.values())
        return Cut(dropped=max(reasons, key=reasons.count))
    return Cut(gone, step - max_lag if masks else None)
