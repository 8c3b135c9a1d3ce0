"""Which tokens of the KV pool are forwarded again under new weights, and in which pieces: `push.kv`.

Each cached token remembers the version that wrote its key and value. "keep" forwards none again, "recompute" all
that an older version wrote, a number k those written more than k optimizer steps before the weights in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.generate.batch import DecodeBatch, RunningGroup
from headway.generate.plan import Ints, Runs
from headway.types import PolicyVersion

Old = Callable[[NDArray[np.int32]], NDArray[np.bool_]]


@dataclass(frozen=True)
class CachedTokens:
    """A stretch of one region's tokens: a prompt's, or a member's own.

    Attributes:
        run: one run that covers them; token_ids: what was forwarded.
        first: position of the first in its sequence.
        written: a view of their versions, to be overwritten when they are forwarded again.
    """

    run: Runs
    token_ids: list[int]
    first: int
    written: NDArray[np.int32]

    def positions(self) -> Ints:
        """Of the tokens in their sequence."""
        return np.arange(self.first, self.first + len(self.token_ids))


def too_old(versions: list[PolicyVersion], kv: str | int) -> Old | None:
    """What of the cache is forwarded again now that versions[-1] is in force.

    Args:
        versions: that were in force, by index; kv: "keep", "recompute" or k.

    Returns:
        From indices of versions to a mask; None: nothing is.
    """
    if kv == "keep":
        return None
    newest = versions[-1]
    if kv == "recompute":
        stale = [version != newest for version in versions]
    else:
        stale = [
            version.epoch != newest.epoch or newest.step - version.step > int(kv) for version in versions
        ]
    stale[-1] = False
    table = np.array(stale, np.bool_)
    return lambda written: table[written]


def stale_tokens(groups: Iterable[RunningGroup], batch: DecodeBatch, old: Old) -> Iterator[CachedTokens]:
    """Everything cached that is too old, prompts before the members that read them.

    A member's last sampled token is not in the pool yet.
    """
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    for group in groups:
        for start, end in _stretches(old(group.written[: group.prefilled])):
            run = Runs(one * (end - start), one * group.prompt_start, one * start, zero, zero)
            yield CachedTokens(run, group.request.prompt_ids[start:end], start, group.written[start:end])
    for row in np.flatnonzero(batch.cached[: batch.size] > 0):
        written = batch.written[row, : batch.cached[row]]
        here = slice(row, row + 1)
        for start, end in _stretches(old(written)):
            run = Runs(
                one * (end - start), batch.own_start[here], one * start, batch.prompt_start[here],
                batch.prompt_length[here],
            )  # fmt: skip
            first = int(batch.prompt_length[row]) + start
            yield CachedTokens(run, batch.tokens[row, start:end].tolist(), first, written[start:end])


def _stretches(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Maximal runs of True, as (start, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))


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
