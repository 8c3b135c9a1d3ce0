"""Which Trajectories messages were received: a message that comes again is acknowledged and taken in no more.

A message is sent again unchanged until its Received arrives, over reconnects and over a resumed learner, so that
(incarnation, seq) names it for good. Within a message each trajectory is held to its ticket: the ledger lets one
trajectory per ticket and member in, from the ticket's holder alone, and none once the ticket has ended. Both
together are de-duplication by trajectory id, INCARNATION.TICKET.MEMBER, in memory bounded by the incarnations and
the outstanding tickets.
"""

from __future__ import annotations

import msgspec

# So many messages may overtake one that is missing; more is a peer that counts wrongly, or one that means harm.
MAX_AHEAD = 1 << 16
MAX_INCARNATIONS = 4096


class Received(msgspec.Struct):
    """Of one incarnation: every message up to `through`, and those `beyond` it."""

    through: int = 0
    beyond: set[int] = msgspec.field(default_factory=set[int])


ReceiptState = dict[str, Received]


class Receipts:
    """Messages received per incarnation; of the incarnations that were heard last."""

    def __init__(self) -> None:
        self._received: ReceiptState = {}

    def accepts(self, seq: int, incarnation: str) -> bool:
        """Whether a seq is one that an orderly peer can have come to: from 1, not absurdly far ahead."""
        through = self._received[incarnation].through if incarnation in self._received else 0
        return 1 <= seq <= through + MAX_AHEAD

    def is_new(self, seq: int, incarnation: str) -> bool:
        """Note a message; False when it was received before.

        After a reconnect a message may overtake older ones that are sent again, so a lower number alone does
        not say that it was received.
        """
        received = self._received.pop(incarnation, None) or Received()
        self._received[incarnation] = received  # last heard, last in order
        if len(self._received) > MAX_INCARNATIONS:
            del self._received[next(iter(self._received))]
        if seq <= received.through or seq in received.beyond:
            return False
        received.beyond.add(seq)
        while received.through + 1 in received.beyond:
            received.through += 1
            received.beyond.remove(received.through)
        return True

    def state(self) -> ReceiptState:
        """As data, detached, for checkpoints."""
        return {name: Received(one.through, set(one.beyond)) for name, one in self._received.items()}

    def restore(self, state: ReceiptState) -> None:
        """Go on from there."""
        self._received = {name: Received(one.through, set(one.beyond)) for name, one in state.items()}
