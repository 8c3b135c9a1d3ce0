"""What a weight channel is: it carries opaque payloads from one learner to its generators.

    learner     publisher -> ChannelSender.publish(Publication)
    generator   stager <- ChannelReceiver.wait / newest / fetch

A channel knows headers, not contents: encoding, digests of what is inside, staging and applying belong to the
core (headway.weights.publisher, headway.weights.stager). A channel may drop, repeat, delay or reorder what it
carries, and may lose its peer at any byte; it must never hand over a payload whose header it cannot name. The
core verifies every payload against its header before anything is applied, and applies a delta only to the state
that it names.

Threads: a sender is used by one thread of the learner, a receiver by one thread of the generator (the stager's,
which also opens it). A channel may have threads of its own behind that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

from headway.types import PolicyVersion


class PayloadKind(StrEnum):
    """What a payload is."""

    WHOLE = "whole"
    DELTA = "delta"


class PayloadHeader(msgspec.Struct, frozen=True):
    """Names one payload.

    Attributes:
        version: that the receiver holds after it.
        kind: whole: the published buffer's bytes; delta: the changes since the state `base_digest`.
        base_digest: of the state that a delta applies to; "" for a whole state.
        state_digest: of the whole published state after it (headway.weights.digest).
        num_bytes: of the payload.
        payload_digest: of the payload's bytes; for a whole state it is the state digest.
    """

    version: PolicyVersion
    kind: PayloadKind
    base_digest: str
    state_digest: str
    num_bytes: int
    payload_digest: str


@dataclass(frozen=True)
class Payload:
    """A payload: `parts` are its bytes in order, never changed once they are published.

    Whoever holds a Payload keeps its memory alive; dropping it is all that is needed to free it.
    """

    header: PayloadHeader
    parts: tuple[memoryview, ...]


@dataclass(frozen=True)
class Publication:
    """One published version, in the forms in which a receiver may want it.

    Attributes:
        version, state_digest: what every form leads to.
        deltas: ready payloads, each from another base; the first is from the version published before. Empty
            for the first version, and when a delta would be no smaller than the whole state.
        whole_header: of the whole state.
        whole: makes the whole state's payload (one copy of the published buffer). May be called from any thread,
            at any time until the sender is given a newer Publication; None is returned when it comes too late,
            and the caller goes on with the newer one. Callers keep the payload rather than ask twice.
        anchor: this version is meant to be kept as a whole state for joiners (every push.anchor-th one).
    """

    version: PolicyVersion
    state_digest: str
    deltas: tuple[Payload, ...]
    whole_header: PayloadHeader
    whole: Callable[[], Payload | None]
    anchor: bool


class ChannelSender(Protocol):
    """The learner's end.

    A point-to-point sender hands over and returns: dead or slow receivers do not hold it up. A collective one
    waits for its receivers, within the deadline.
    """

    @property
    def address(self) -> str:
        """What receivers open (headway.weights.open); sent to every generator in its Welcome."""
        ...

    def publish(self, publication: Publication, deadline_s: float) -> None:
        """Make `publication` the newest; an older one that is still queued is skipped.

        Raises:
            WeightError: it could not be handed over; names the receiver and gives its own words where there is
                one. The next publish works without anybody being restarted.
            DeadlineExceeded: receivers that must take part did not, within `deadline_s`.
        """
        ...

    def close(self) -> None:
        """Let go of everything; bounded."""
        ...


class ChannelReceiver(Protocol):
    """A generator's end."""

    def wait(self, timeout_s: float) -> None:
        """Return as soon as `newest` may answer something new, at the latest after `timeout_s`."""
        ...

    def newest(self, held: PolicyVersion | None, base_digest: str) -> PayloadHeader | None:
        """The payload that brings what is held forward, best first: a delta from `base_digest`, else a whole one.

        A store may need several hops (an anchor, then deltas): each call names the next. A version whose weights
        equal those of the one before has an empty delta, whose base and state digests are equal.

        Args:
            held: the version held so far, None when there is none.
            base_digest: of its state; "" when there is none, or when it is not to be trusted: then only a whole
                state will do, that of the version held included.

        Returns:
            None when nothing newer than `held` is published (base_digest "": nothing at all).
        """
        ...

    def fetch(self, header: PayloadHeader, into: memoryview, deadline_s: float) -> None:
        """Fill `into` (header.num_bytes bytes, writable) with the payload that `newest` named.

        What is in `into` after an error is unspecified; it is never what is being served.

        Raises:
            WeightError: it is gone (a newer one has replaced it), or the peer failed; says which.
            DeadlineExceeded: not complete after `deadline_s`; says how many bytes came.
        """
        ...

    def ask_whole(self, reason: str) -> None:
        """A payload did not verify or fit: tell the sender, so that a whole state can be had. Never waits."""
        ...

    def close(self) -> None:
        """Let go of everything; bounded."""
        ...
