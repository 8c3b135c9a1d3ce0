"""The generators as the learner knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.types import PolicyVersion, TimeSplit
from headway.wire.messages import Heartbeat, Hello

NO_TIME = TimeSplit(0.0, 0.0, 0.0, 0.0)


@dataclass
class Peer:
    """One live incarnation of one generator.

    Attributes:
        address: how the stream names it; index: of the generator.
        acked: version in force there, None before its first WeightAck.
        tickets: outstanding there, unfinished; last_grant: number of the last Grant with a new one.
        split: its time so far, from its last heartbeat; lap: the same at the last step's record.
    """

    address: bytes
    incarnation: str
    index: int
    pid: int
    acked: PolicyVersion | None
    tickets: set[int] = field(default_factory=set[int])
    last_grant: int = 0
    split: TimeSplit = NO_TIME
    lap: TimeSplit = NO_TIME

    @staticmethod
    def from_hello(address: bytes, hello: Hello) -> Peer:
        """A peer that has just said Hello; what it serves is known when it acks."""
        return Peer(address, hello.incarnation, hello.generator, hello.pid, None)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Take in what a heartbeat says."""
        self.split = heartbeat.split

    def take_lap(self) -> TimeSplit:
        """Its time since the last call."""
        now, before = self.split, self.lap
        self.lap = now
        return TimeSplit(
            now.work - before.work, now.push - before.push, now.idle - before.idle, now.other - before.other
        )


def add(*splits: TimeSplit) -> TimeSplit:
    """Their sum."""
    return TimeSplit(
        sum(split.work for split in splits),
        sum(split.push for split in splits),
        sum(split.idle for split in splits),
        sum(split.other for split in splits),
    )
