"""When a generator may be started again. Pure: the caller gives the time."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0


class Restarts:
    """The restarts of one generator: at most `most`, each after a longer pause than the last."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: restarts allowed over the whole run.
        """
        self.most = most
        self.count = 0
        self._due_s: float | None = None

    def ended(self, now_s: float) -> bool:
        """The generator has ended. Returns whether it may be started again; `due` says when."""
        if self.count >= self.most:
            return False
        self._due_s = now_s + min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**self.count)
        self.count += 1
        return True

    def due(self, now_s: float) -> bool:
        """Whether the pause is over. True once for each restart."""
        if self._due_s is None or now_s < self._due_s:
            return False
        self._due_s = None
        return True
