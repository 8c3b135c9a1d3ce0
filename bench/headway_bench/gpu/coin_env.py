"""Rewards that say nothing: whether the sum of a completion's ids is odd. For random models, which solve no task."""

from __future__ import annotations

import random
from typing import Any


class Coin:
    """Prompts of eight digits; half of all completions are right, whatever the policy."""

    num_prompts: int | None = None

    def prompt(self, index: int) -> str:
        """One line."""
        stream = random.Random(index)
        return "".join(str(stream.randrange(10)) for _ in range(8)) + "="

    def reward(self, index: int, completion: Any) -> float:
        """0 or 1."""
        return float((sum(completion.token_ids) + index) % 2)
