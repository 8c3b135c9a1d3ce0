"""The versions in the weight channel, and whether the generators serve what was published."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from headway.errors import TrainingStopped
from headway.learner.peers import Peer
from headway.types import PolicyVersion
from headway.wire.messages import WeightAck

MAX_BAD_DIGESTS = 2
_KEPT = 64
_MAX_UNCHECKED = 4096


@dataclass(frozen=True)
class AckLap:
    """Acks of some time, zeros without one.

    Attributes:
        delay_s: mean seconds from a version's publication to its ack; pause_s: mean seconds that decoding stood still.
    """

    delay_s: float
    pause_s: float


class Versions:
    """Digests of the newest versions, and the acks that came before their version was known here.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._digests: dict[PolicyVersion, str] = {}
        self._published_s: dict[PolicyVersion, float] = {}
        self._delays: list[float] = []
        self._pauses: list[float] = []
        self._unchecked: list[tuple[bytes, WeightAck]] = []
        self._num_bad = 0

    def published(self, version: PolicyVersion, digest: str) -> list[tuple[bytes, WeightAck]]:
        """Remember what the acks of a version must say; returns those that wait to be looked at, with their peers."""
        self._digests[version] = digest
        self._published_s[version] = self._clock()
        while len(self._digests) > _KEPT:
            oldest = min(self._digests)
            del self._digests[oldest], self._published_s[oldest]
        unchecked, self._unchecked = self._unchecked, []
        return unchecked

    def acked(self, peer: Peer, ack: WeightAck) -> str:
        """Note what a generator has put in force; returns why it must be given up, "" when it need not.

        Raises:
            TrainingStopped: this happens again and again.
        """
        expected = self._digests.get(ack.version)
        if expected is None and ack.version > max(self._digests, default=ack.version):
            # Seen in the channel before the main loop said what it published: checked when it does.
            self._unchecked.append((peer.address, ack))
            del self._unchecked[:-_MAX_UNCHECKED]
        if expected is not None and ack.digest != expected:
            self._num_bad += 1
            why = f"serves {ack.digest} as version {ack.version}, published was {expected}"
            if self._num_bad > MAX_BAD_DIGESTS:
                raise TrainingStopped(f"generator {peer.index} {why}; weights do not arrive as they are sent")
            return why
        if peer.acked is None or ack.version > peer.acked:
            peer.acked = ack.version
            if expected is not None:
                self._delays.append(self._clock() - self._published_s[ack.version])
                self._pauses.append(ack.pause_s)
        return ""

    def take_lap(self) -> AckLap:
        """Of the acks since the last call."""
        delays, pauses = self._delays, self._pauses
        self._delays, self._pauses = [], []
        return AckLap(statistics.fmean(delays), statistics.fmean(pauses)) if delays else AckLap(0.0, 0.0)
