"""The KV pool and its regions: contiguous token ranges, first fit, coalesced on release.

A group's prompt takes one region that all its members read; each member takes one region for its own tokens. A
sequence's cache is therefore two ranges, and nothing is ever copied or paged.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

from headway.model import KVPool, Policy

MAX_POOL_BYTES = 4 << 30


def make_pool(policy: Policy, max_running: int, kv_tokens: int) -> KVPool:
    """A pool of `kv_tokens` tokens; 0: what max_running sequences of the full context need, within MAX_POOL_BYTES."""
    token_bytes = 2 * 4 * policy.num_layers * policy.num_kv_heads * policy.head_dim
    most = MAX_POOL_BYTES // token_bytes
    num_tokens = kv_tokens or min(most, max_running * min(policy.context_length, most))
    shape = (policy.num_layers, num_tokens, policy.num_kv_heads, policy.head_dim)
    return KVPool(torch.zeros(shape), torch.zeros(shape))


class RegionAllocator:
    """Token ranges of a pool.

    Args:
        num_tokens: of the pool.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_free = num_tokens
        self._starts = [0]
        self._sizes = [num_tokens]

    def take(self, size: int) -> int | None:
        """The start of a free range of `size` tokens, None if none is large enough."""
        for index, free in enumerate(self._sizes):
            if free >= size:
                start = self._starts[index]
                if free == size:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] += size
                    self._sizes[index] -= size
                self.num_free -= size
                return start
        return None

    def take_all(self, sizes: Sequence[int]) -> list[int] | None:
        """The start of a free range for each size; None, with nothing taken, if one does not fit."""
        if sum(sizes) > self.num_free:
            return None
        starts: list[int] = []
        for size in sizes:
            start = self.take(size)
            if start is None:
                for taken, length in zip(starts, sizes, strict=False):
                    self.release(taken, length)
                return None
            starts.append(start)
        return starts

    def release(self, start: int, size: int) -> None:
        """Give a range back."""
        index = bisect.bisect_left(self._starts, start)
        self._starts.insert(index, start)
        self._sizes.insert(index, size)
        self.num_free += size
        if index + 1 < len(self._starts) and start + size == self._starts[index + 1]:
            self._sizes[index] += self._sizes[index + 1]
            del self._starts[index + 1], self._sizes[index + 1]
        if index > 0 and self._starts[index - 1] + self._sizes[index - 1] == start:
            self._sizes[index - 1] += self._sizes[index]
            del self._starts[index], self._sizes[index]
