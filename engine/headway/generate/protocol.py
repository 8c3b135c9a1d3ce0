"""What a generator asks of an inference engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import HeadwayError
from headway.types import DropReason, FinishReason, KeptSets, Manifest, PolicyVersion, Sampling, VersionSpan
from headway.weights.served import Served


@dataclass(frozen=True)
class GroupRequest:
    """The members of one group, which share the prompt.

    Attributes:
        request_id: the ticket's id; prompt_ids: never empty.
        num_members, sampling, seed, held: as in headway.types.Ticket.
    """

    request_id: int
    prompt_ids: list[int]
    num_members: int
    sampling: Sampling
    seed: int
    held: frozenset[int] = frozenset()

    @property
    def members(self) -> list[int]:
        """Those to sample."""
        return [member for member in range(self.num_members) if member not in self.held]


@dataclass(frozen=True)
class FinishedMember:
    """A completion. Arrays cover its C sampled tokens, the stop token included.

    Attributes:
        token_ids: int32 [C]; logprobs: fp32 [C] at the sampling temperature.
        spans: positions count from the prompt's start, as in Trajectory.
        started_s, finished_s: Unix time of admission to a decode step and of the last token.
        kept: what the tokens were sampled from, where sampling.keep_sets asks for it.
    """

    request_id: int
    member: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: list[VersionSpan]
    finish_reason: FinishReason
    started_s: float
    finished_s: float
    kept: KeptSets | None = None


class Unservable(HeadwayError, ValueError):
    """A request that this engine cannot ever serve; a counted drop.

    Attributes:
        reason: the DropReason it is counted under.
    """

    def __init__(self, reason: DropReason, message: str) -> None:
        self.reason = reason
        self.message = message
        super().__init__(reason, message)

    def __str__(self) -> str:
        return self.message


class InferenceEngine(Protocol):
    """Decodes many sequences at once; weights are swapped between two steps, in place.

    One thread owns an engine. Nothing in it waits.
    """

    @property
    def manifest(self) -> Manifest:
        """Of the weights it serves."""
        ...

    @property
    def version(self) -> PolicyVersion | None:
        """In force; None before the first apply."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences in the decode batch."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences not yet admitted to it."""
        ...

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since the start, of all sequences, aborted ones included."""
        ...

    def add(self, request: GroupRequest) -> None:
        """Queue a group; its members join the batch in the order of arrival.

        Raises:
            Unservable: it can never be served.
            ValueError: a group of this id is in the engine.
        """
        ...

    def abort(self, request_id: int) -> int:
        """Forget a group; returns the sampled tokens that die with it."""
        ...

    def step(self) -> list[FinishedMember]:
        """One forward over all running sequences: one new token each; members that ended."""
        ...

    @property
    def served(self) -> Served:
        """Its weights, for a stager to push into."""
        ...

    def apply(self, copy: Callable[[Tensor], PolicyVersion]) -> None:
        """Put a version in force: `copy` fills all flat weights, fp32 [num_elements], and says which it is.

        Requests in flight go on under it. If `copy` raises, the weights may be of no version: a step raises
        WeightError until another apply has succeeded.
        """
        ...

    def hold(self, held: bool) -> None:
        """While held, waiting groups are not admitted; running ones go on."""
        ...

    def restart(self) -> None:
        """Drop the cache of every running sequence; each goes on from its own prefix, forwarded again.

        Nothing sampled is lost, and no step takes more prompt tokens for it than any other.
        """
        ...
