"""Accounts of the ledger: how many things were opened and how they ended, and each generator's tokens."""

from __future__ import annotations

from collections import Counter

import msgspec

TRAINED = "trained"
MASKED = "masked"


class Account(msgspec.Struct):
    """Things of one kind: how many were opened, and how they ended."""

    opened: int = 0
    ended: dict[str, int] = msgspec.field(default_factory=dict[str, int])

    def end(self, outcome: str, num: int) -> None:
        """Count `num` of them as ended."""
        if num < 0:
            raise AssertionError(f"{num} things cannot end as {outcome}")
        if num:
            self.ended[outcome] = self.ended.get(outcome, 0) + num

    @property
    def dropped(self) -> int:
        """Ended neither trained nor masked."""
        return sum(num for outcome, num in self.ended.items() if outcome not in (TRAINED, MASKED))

    def open(self) -> int:
        """Opened and not ended."""
        return self.opened - sum(self.ended.values())

    def counts(self, opened: str) -> dict[str, int]:
        """As a plain dict: what was opened, under this name, and each way of ending, "dropped.<reason>" too."""
        ended = Counter(self.ended)
        counts = {opened: self.opened, TRAINED: ended.pop(TRAINED, 0)}
        if opened == "received":
            counts[MASKED] = ended.pop(MASKED, 0)
        counts["dropped"] = self.dropped
        return counts | {f"dropped.{reason}": num for reason, num in sorted(ended.items())}


class GeneratorTokens(msgspec.Struct):
    """Sampled tokens of one generator incarnation: the most it reported, and what of them was received.

    Attributes:
        lost: it is gone, so what was not received never will be (unless it reports again).
    """

    generated: int = 0
    received: int = 0
    lost: bool = False

    @property
    def unsent(self) -> int:
        """Sampled and not received; 0 while its messages run ahead of its reports."""
        return max(0, self.generated - self.received)
