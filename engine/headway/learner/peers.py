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
        tickets: outstanding there, unfinished.
        last_seq: every Trajectories message up to this one was received; ahead: those received beyond it.
        split: its time so far, from its last heartbeat; lap: the same at the last step's record.
    """

    address: bytes
    incarnation: str
    index: int
    pid: int
    acked: PolicyVersion | None
    tickets: set[int] = field(default_factory=set[int])
    last_seq: int = 0
    ahead: set[int] = field(default_factory=set[int])
    split: TimeSplit = NO_TIME
    lap: TimeSplit = NO_TIME

    @staticmethod
    def from_hello(address: bytes, hello: Hello) -> Peer:
        """A peer that has just said Hello; what it serves is known when it acks."""
        return Peer(address, hello.incarnation, hello.generator, hello.pid, None)

    def is_new(self, seq: int) -> bool:
        """Note a Trajectories message; False when it was received before.

        After a reconnect a message may overtake older ones that are sent again, so a lower number alone does
        not say that it was received.
        """
        if seq <= self.last_seq or seq in self.ahead:
            return False
        self.ahead.add(seq)
        while self.last_seq + 1 in self.ahead:
            self.last_seq += 1
            self.ahead.remove(self.last_seq)
        return True

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
