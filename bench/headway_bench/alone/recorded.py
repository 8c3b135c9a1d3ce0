"""Groups that were generated once: what a generator that takes no time answers with."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.buffer import Group
from headway.learner.prompts import TokenisedPrompt
from headway.types import FinishReason, KeptSets, Trajectory


@dataclass(frozen=True)
class Completion:
    """A member's C sampled tokens: ids int32 [C], log-probs fp32 [C]."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    reason: FinishReason
    kept: KeptSets | None


@dataclass(frozen=True)
class Recorded:
    """Prompts, and the completions of each one's members.

    Attributes:
        prompts: no two with the same ids.
    """

    prompts: list[TokenisedPrompt]
    members: list[list[Completion]]

    @staticmethod
    def of(groups: Sequence[Group]) -> Recorded:
        """Finished groups; of groups with the same prompt the first."""
        known = {tuple(group.ticket.prompt_ids): group for group in reversed(groups)}
        chosen = sorted(known.values(), key=lambda group: group.ticket.ticket_id)
        return Recorded(
            [TokenisedPrompt(group.ticket.prompt_index, list(group.ticket.prompt_ids)) for group in chosen],
            [[_completion(member) for member in group.trajectories] for group in chosen],
        )

    def answers(self) -> dict[tuple[int, ...], list[Completion]]:
        """By prompt ids."""
        return {
            tuple(prompt.token_ids): members
            for prompt, members in zip(self.prompts, self.members, strict=True)
        }

    def write(self, path: Path) -> None:
        """For `read_recorded`, in a process of the same bench."""
        path.write_bytes(pickle.dumps(self))


def read_recorded(path: Path) -> Recorded:
    """A file of `Recorded.write`; nothing else may be given to it."""
    loaded: Any = pickle.loads(path.read_bytes())
    assert isinstance(loaded, Recorded)
    return loaded


def _completion(member: Trajectory) -> Completion:
    start = member.prompt_length
    return Completion(
        member.token_ids[start:].astype(np.int32),
        member.logprobs[start:].astype(np.float32),
        member.finish_reason,
        member.kept,
    )
