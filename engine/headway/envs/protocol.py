"""What an environment is: prompts by index, and a reward for a completion of one.

The learner asks for prompts; reward workers, which are processes of their own, ask for rewards. Both build
the environment from the same arguments, so everything it says must follow from those and the index.
"""

from __future__ import annotations

from typing import Protocol, TypedDict

import msgspec


class Message(TypedDict):
    """One turn of a chat prompt."""

    role: str
    content: str


Prompt = str | list[Message]
"""Plain text, or messages that the learner renders with the tokenizer's chat template."""


class Completion(msgspec.Struct, frozen=True):
    """What the policy answered.

    Attributes:
        text: token_ids decoded, special tokens included, without the stop token that ended it. A stop string
            is part of the text.
        token_ids: the sampled ids, the stop token included.
        finish_reason: "stop" | "length".
    """

    text: str
    token_ids: list[int]
    finish_reason: str


class Environment(Protocol):
    """Prompts and rewards.

    Attributes:
        num_prompts: indices run from 0 to num_prompts - 1; None if there is no last one.
    """

    num_prompts: int | None

    def prompt(self, index: int) -> Prompt:
        """The prompt of `index`: a pure function of the constructor's arguments and the index."""
        ...

    def reward(self, index: int, completion: Completion) -> float:
        """A finite number. Raising, or returning anything else, is a failure and not a reward of 0."""
        ...
