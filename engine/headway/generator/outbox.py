"""What a rollout has for the learner, and how much of it one message carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.types import MemberFailure, Trajectory
from headway.wire.messages import WeightAck

MAX_KEPT_IDS = 1 << 24  # of a trajectory and of a message: 64 MiB, a quarter of what a frame may hold


@dataclass
class Outbox:
    """What a turn has for the learner.

    Attributes:
        acks: versions put in force; finished, failures: members.
    """

    acks: list[WeightAck] = field(default_factory=list[WeightAck])
    finished: list[Trajectory] = field(default_factory=list[Trajectory])
    failures: list[MemberFailure] = field(default_factory=list[MemberFailure])


def how_many_fit(trajectories: Sequence[Trajectory]) -> int:
    """The first so many are one message, by the ids of their kept sets."""
    total = 0
    for index, trajectory in enumerate(trajectories):
        total += 0 if trajectory.kept is None else len(trajectory.kept.ids)
        if total > MAX_KEPT_IDS and index:
            return index
    return len(trajectories)
