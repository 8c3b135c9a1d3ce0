"""Trajectories: what a generator sends and the learner trains on.

Alignment, one convention everywhere: position i of `logprobs`, `loss_mask` and the learner's own log-probs
belongs to token_ids[i] given token_ids[:i]. Position 0 is never trained.

Legend: L tokens of the trajectory (prompt first), C = L - prompt_length sampled tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from headway.types.version import PolicyVersion


class FinishReason(enum.StrEnum):
    """Why the engine stopped; carried from the engine, never guessed from the last token."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a trajectory were sampled by `version` (positions count from the prompt's start)."""

    start: int
    end: int
    version: PolicyVersion


class KeptSets(msgspec.Struct, frozen=True, eq=False):
    """The ids that each token was sampled from, where top-k, top-p or min-p left fewer than all.

    Attributes:
        counts: int32 [C], of every token after the prompt; 0 where it was not sampled.
        ids: int32 [K], K the sum of counts: the first token's, then the next one's. The token is among its own.
    """

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]

    @staticmethod
    def of(sets: Sequence[NDArray[np.int32]]) -> KeptSets:
        """One set for each token."""
        counts = np.array([len(ids) for ids in sets], np.int32)
        return KeptSets(counts, np.concatenate([np.zeros(0, np.int32), *sets]))


class Trajectory(msgspec.Struct, frozen=True, eq=False, omit_defaults=True):
    """One sampled completion with everything that training on it needs.

    Attributes:
        trajectory_id: unique in a run: "<generator incarnation>.<ticket>.<member>".
        ticket_id, member: the group it belongs to and its place there.
        prompt_index: the environment's index; prompt_hash: xxh3-64 of the prompt's ids (int32, little endian).
        prompt_length: tokens of token_ids that are the prompt.
        token_ids: int32 [L].
        loss_mask: bool [L]; False on the prompt and on every token not sampled by the policy.
        logprobs: float32 [L]; behaviour log-probs at `temperature`; 0 where loss_mask is False.
        spans: cover [prompt_length, L) exactly, in order, without gaps.
        temperature: that the tokens were sampled at.
        finish_reason: from the engine.
        reward: None until scored.
        num_cached: prompt tokens whose KV came from a cache.
        started_s, finished_s: Unix time of the first admission to a decode step and of the last token.
        kept: what its tokens were sampled from; None: all of the vocabulary, or nobody asked. Log-probs are over it.
    """

    trajectory_id: str
    ticket_id: int
    member: int
    prompt_index: int
    prompt_hash: int
    prompt_length: int
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    spans: list[VersionSpan]
    temperature: float
    finish_reason: FinishReason
    reward: float | None
    num_cached: int
    started_s: float
    finished_s: float
    kept: KeptSets | None = None

    @property
    def num_tokens(self) -> int:
        """All tokens, the prompt's included."""
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled and that may carry loss."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def oldest(self) -> PolicyVersion:
        """The oldest version among the sampled tokens; it decides the trajectory's lag."""
        return min(span.version for span in self.spans)

    def lag(self, step: int) -> int:
        """The worst token's lag, in optimizer steps, when consumed by weights of `step`."""
        return step - self.oldest.step

    def token_lags(self, step: int) -> NDArray[np.int64]:
        """Per sampled token: lag in optimizer steps when consumed by weights of `step`. Shape [C]."""
        lags = np.empty(self.num_tokens - self.prompt_length, dtype=np.int64)
        for span in self.spans:
            lags[span.start - self.prompt_length : span.end - self.prompt_length] = step - span.version.step
        return lags


class MemberFailure(msgspec.Struct, frozen=True):
    """A member of a group that ends without a trajectory to train on.

    Attributes:
        reason: a DropReason value; detail: the first error's text, for people.
        num_tokens: sampled tokens that die with it.
    """

    ticket_id: int
    member: int
    reason: str
    detail: str
    num_tokens: int


def prompt_digest(prompt_ids: Sequence[int] | NDArray[np.int32]) -> int:
    """xxh3-64 of the ids as little-endian int32: binds a trajectory to the prompt its ticket carried."""
    return xxhash.xxh3_64_intdigest(np.asarray(prompt_ids, dtype="<i4").tobytes())
