"""The digit-sorting task: `^s41325=` is to be answered with `12345` and the end token `$`.

Prompts are the draws of one random stream, so that index i is the same prompt for every reader of the seed.
"""

from __future__ import annotations

import random
from typing import Literal

from headway.envs.protocol import Completion
from headway.errors import EnvironmentFailure

DIGITS = "0123456789"
END = "$"


class SortEnvironment:
    """Sort the digits of the prompt.

    Args:
        digits: how many digits a prompt holds.
        seed: of the stream that all prompts are drawn from, in order.
        reward: "exact": 1 for the sorted digits up to the first `$`, else 0. "sum7": the sum of the token ids
            modulo 7, which varies within any group; for throughput runs in which the text means nothing.

    Raises:
        EnvironmentFailure: digits < 1.
    """

    num_prompts: int | None = None

    def __init__(self, *, digits: int = 5, seed: int = 0, reward: Literal["exact", "sum7"] = "exact") -> None:
        if digits < 1:
            raise EnvironmentFailure(f"digits: got {digits}, expected at least 1")
        self._digits = digits
        self._by_text = reward == "exact"
        self._stream = random.Random(seed)
        self._prompts: list[str] = []

    def prompt(self, index: int) -> str:
        """`^s<digits>=`. Draws the stream up to `index` once, then looks up."""
        while len(self._prompts) <= index:
            drawn = "".join(self._stream.choice(DIGITS) for _ in range(self._digits))
            self._prompts.append(f"^s{drawn}=")
        return self._prompts[index]

    def reward(self, index: int, completion: Completion) -> float:
        """1 or 0 by the text, or 0 to 6 by the ids."""
        if not self._by_text:
            return float(sum(completion.token_ids) % 7)
        expected = "".join(sorted(self.prompt(index)[2:-1]))
        return float(completion.text.split(END)[0] == expected)
