"""Where tickets get their prompts: the order of indices, passes over bounded sets, and prompts that come back."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from headway.config import EnvConfig
from headway.envs import Environment
from headway.model import Tokenizer


class TokenisedPrompt(msgspec.Struct, frozen=True):
    """The environment's index and the ids that the generator gets."""

    index: int
    token_ids: list[int]


class PromptState(msgspec.Struct, frozen=True):
    """Where a source stands.

    Attributes:
        cursor: position in the order of the next new prompt; returned: prompts that go out before it.
    """

    cursor: int
    returned: list[TokenisedPrompt]


class PromptSource:
    """Hands out prompts, one at a time, in an order that depends on the seed only.

    Args:
        environment: asked for prompts; tokenizer: renders and encodes them.
        config: passes and shuffle; seed: of the order.

    Attributes:
        cursor: position in the order of the next new prompt.
    """

    def __init__(self, environment: Environment, tokenizer: Tokenizer, config: EnvConfig, seed: int) -> None:
        self._environment = environment
        self._tokenizer = tokenizer
        self._passes = config.passes
        self._shuffle = config.shuffle
        self._seed = seed
        self.cursor = 0
        self._returned: deque[TokenisedPrompt] = deque()
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def passes_done(self) -> int:
        """Whole passes over a bounded prompt set."""
        count = self._environment.num_prompts
        return self.cursor // count if count else 0

    @property
    def exhausted(self) -> bool:
        """No prompt is left: every pass is done and none came back."""
        count = self._environment.num_prompts
        return bool(count and self._passes and self.cursor >= count * self._passes and not self._returned)

    def next(self) -> TokenisedPrompt | None:
        """The next prompt, None when exhausted. Prompts given back come first."""
        if self._returned:
            return self._returned.popleft()
        if self.exhausted:
            return None
        index = self._index(self.cursor)
        self.cursor += 1
        return TokenisedPrompt(index, self._tokenizer.encode_prompt(self._environment.prompt(index)))

    def give_back(self, prompt: TokenisedPrompt) -> None:
        """Its ticket was lost with a generator: a later ticket carries it again."""
        self._returned.append(prompt)

    def state(self) -> PromptState:
        """For a checkpoint."""
        return PromptState(self.cursor, list(self._returned))

    def restore(self, state: PromptState) -> None:
        """Go on from there."""
        self.cursor, self._returned = state.cursor, deque(state.returned)

    def _index(self, position: int) -> int:
        count = self._environment.num_prompts
        if not count:
            return position
        turn, place = divmod(position, count)
        if not self._shuffle:
            return place
        if self._order[0] != turn:
            self._order = (turn, np.random.default_rng([self._seed, turn]).permutation(count).tolist())
        return self._order[1][place]
