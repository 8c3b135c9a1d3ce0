"""A channel in memory that drops, repeats, delays, reorders, cuts and corrupts what it carries, by a seeded draw."""

from __future__ import annotations

import random

from headway.errors import DeadlineExceeded, WeightError
from headway.types import PolicyVersion
from headway.weights import Payload, PayloadHeader, PayloadKind, Publication

FAULTS = ("cut", "bit", "length", "gone", "late", "other base", "garbage", "stale", "misnamed")


class ChaosChannel:
    """Sender and receiver at once: remembers every publication and what its receivers asked.

    Args:
        draw: decides; share: of the answers that are faulty.
    """

    address = "chaos:"

    def __init__(self, draw: random.Random, share: float = 0.0) -> None:
        self.draw, self.share = draw, share
        self.history: list[Publication] = []
        self.asked: list[str] = []
        self.fault = ""
        self.wholes: dict[PolicyVersion, Payload] = {}

    def publish(self, publication: Publication, deadline_s: float) -> None:
        self.history.append(publication)
        self.wholes.clear()
        whole = publication.whole()
        assert whole is not None
        self.wholes[publication.version] = whole

    def wait(self, timeout_s: float) -> None:
        pass

    def newest(self, held: PolicyVersion | None, base_digest: str) -> PayloadHeader | None:
        self.fault = self.draw.choice(FAULTS) if self.draw.random() < self.share else ""
        idle = not self.history or (base_digest and held is not None and held >= self.history[-1].version)
        if idle and (self.fault not in ("stale", "other base") or len(self.history) < 2):
            return None
        if self.fault == "stale":  # delivered again, or long overtaken
            old = self.draw.choice(self.history)
            return self.draw.choice([old.whole_header, *(delta.header for delta in old.deltas)])
        if self.fault == "other base":
            deltas = [delta.header for each in self.history for delta in each.deltas]
            return self.draw.choice(deltas) if deltas else None
        newest = self.history[-1]
        for delta in newest.deltas:
            if base_digest and delta.header.base_digest == base_digest:
                return delta.header
        return newest.whole_header

    def fetch(self, header: PayloadHeader, into: memoryview, deadline_s: float) -> None:
        payload = self._find(header)
        data = bytearray(b"".join(payload.parts))
        if self.fault == "gone":
            raise WeightError("it is gone")
        if self.fault in ("cut", "late"):
            at = self.draw.randrange(len(data))
            into[:at] = data[:at]
            if self.fault == "late":
                raise DeadlineExceeded(f"{at} bytes came")
            return  # a channel that does not notice what it lost
        if self.fault == "bit":
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
        if self.fault == "garbage":
            data[:] = self.draw.randbytes(len(data))
        if self.fault == "misnamed":  # another version's payload under this header
            others = [p for each in self.history for p in each.deltas if len(p.parts[0]) and p is not payload]
            if others:
                data = bytearray(b"".join(self.draw.choice(others).parts))
        if self.fault == "length" and len(data) > 1:
            data = data[: self.draw.randrange(1, len(data))]
        size = min(len(data), len(into))
        into[:size] = data[:size]

    def _find(self, header: PayloadHeader) -> Payload:
        for each in self.history:
            for delta in each.deltas:
                if delta.header == header:
                    return delta
        if header.kind is PayloadKind.WHOLE and header.version in self.wholes:
            return self.wholes[header.version]
        raise WeightError(f"{header.version} is gone")

    def ask_whole(self, reason: str) -> None:
        self.asked.append(reason)

    def close(self) -> None:
        pass
