"""What is in the KV pool, as tokens to forward again: for `push.kv = "recompute"`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from headway.generate.batch import DecodeBatch, RunningGroup
from headway.generate.plan import Ints, Runs


@dataclass(frozen=True)
class CachedTokens:
    """One region's tokens: a prompt's, or a member's own.

    Attributes:
        run: one run that covers them; token_ids: what was forwarded.
        first: position of the first in its sequence.
    """

    run: Runs
    token_ids: list[int]
    first: int

    def positions(self) -> Ints:
        """Of the tokens in their sequence."""
        return np.arange(self.first, self.first + len(self.token_ids))


def cached_tokens(groups: Iterable[RunningGroup], batch: DecodeBatch) -> Iterator[CachedTokens]:
    """Everything cached, prompts before the members that read them.

    A member's last sampled token is not in the pool yet.
    """
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    for group in groups:
        if group.prefilled:
            run = Runs(one * group.prefilled, one * group.prompt_start, zero, zero, zero)
            yield CachedTokens(run, group.request.prompt_ids[: group.prefilled], 0)
    for row in np.flatnonzero(batch.count[: batch.size] > 1):
        cached = int(batch.count[row]) - 1
        here = slice(row, row + 1)
        prompt = (batch.prompt_start[here], batch.prompt_length[here])
        run = Runs(one * cached, batch.own_start[here], zero, *prompt)
        yield CachedTokens(run, batch.tokens[row, :cached].tolist(), int(batch.prompt_length[row]))


def chunked(parts: Iterable[CachedTokens], most: int) -> Iterator[list[CachedTokens]]:
    """Consecutive parts of at most `most` tokens together; a longer part is a chunk of its own."""
    chunk: list[CachedTokens] = []
    num_tokens = 0
    for part in parts:
        if chunk and num_tokens + len(part.token_ids) > most:
            yield chunk
            chunk, num_tokens = [], 0
        chunk.append(part)
        num_tokens += len(part.token_ids)
    if chunk:
        yield chunk
