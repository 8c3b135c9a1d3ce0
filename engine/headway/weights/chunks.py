"""A payload cut into chunks, and the digest of everything up to each chunk's end.

The state of one xxh3-64 pass after chunk k travels with chunk k: a receiver verifies each chunk before it keeps
it, against everything that came before, and a transfer that goes on after a cut carries its state on.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from headway.errors import UnsupportedOption, WeightError


@dataclass(frozen=True)
class ChunkPlan:
    """Where the chunks of a payload lie; an empty payload has none.

    Args:
        num_bytes: of the payload, of any size; chunk_bytes: of every chunk but the last.

    Raises:
        UnsupportedOption: a negative size or an empty chunk.
    """

    num_bytes: int
    chunk_bytes: int

    def __post_init__(self) -> None:
        if self.num_bytes < 0 or self.chunk_bytes < 1:
            raise UnsupportedOption(
                f"a payload of {self.num_bytes} bytes in chunks of {self.chunk_bytes}; expected >= 0 and >= 1"
            )

    @property
    def num_chunks(self) -> int:
        """Chunks of the payload."""
        return -(-self.num_bytes // self.chunk_bytes)

    def bounds(self, index: int) -> tuple[int, int]:
        """First byte of chunk `index` and the one after its last.

        Raises:
            IndexError: no such chunk.
        """
        if not 0 <= index < self.num_chunks:
            raise IndexError(f"chunk {index} of {self.num_chunks}")
        start = index * self.chunk_bytes
        return start, min(self.num_bytes, start + self.chunk_bytes)


class Parts:
    """Pieces of memory read as one run of bytes.

    Args:
        parts: contiguous, in order; empty ones are allowed.
    """

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = [part.cast("B") for part in parts if part.nbytes]
        self._starts = [0]
        for part in self._parts:
            self._starts.append(self._starts[-1] + part.nbytes)

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return self._starts[-1]

    def slice(self, start: int, end: int) -> memoryview:
        """Bytes start to end: a view where they lie in one part, else a copy."""
        first = bisect.bisect_right(self._starts, start) - 1
        if end <= self._starts[first + 1]:
            offset = self._starts[first]
            return self._parts[first][start - offset : end - offset]
        joined = bytearray(end - start)
        at = start
        while at < end:
            index = bisect.bisect_right(self._starts, at) - 1
            stop = min(end, self._starts[index + 1])
            offset = self._starts[index]
            joined[at - start : stop - start] = self._parts[index][at - offset : stop - offset]
            at = stop
        return memoryview(joined)


class ChunkedPayload:
    """A payload that is all there, chunk by chunk, for any number of threads.

    Digests are made in order, as far as they are asked for. Making a digest as its chunk is about to be sent leaves
    the chunk in the cache for the copy into the kernel.

    Args:
        parts: bytes that do not change; num_bytes: of all of them.

    Raises:
        WeightError: the parts hold another number of bytes.
    """

    def __init__(self, parts: Sequence[memoryview], num_bytes: int, chunk_bytes: int) -> None:
        self.plan = ChunkPlan(num_bytes, chunk_bytes)
        self._parts = Parts(parts)
        self._state = xxhash.xxh3_64()
        self._digests: list[int] = []
        self._lock = threading.Lock()
        if self._parts.num_bytes != num_bytes:
            raise WeightError(
                f"a payload's header names {num_bytes} bytes, its parts hold {self._parts.num_bytes}"
            )

    @property
    def num_ready(self) -> int:
        """Chunks that can be given: all."""
        return self.plan.num_chunks

    def chunk(self, index: int) -> tuple[int, memoryview]:
        """The digest of everything up to the end of chunk `index`, and the chunk.

        Raises:
            IndexError: no such chunk.
        """
        self.plan.bounds(index)
        with self._lock:
            while len(self._digests) <= index:
                self._state.update(self._parts.slice(*self.plan.bounds(len(self._digests))))
                self._digests.append(self._state.intdigest())
        return self._digests[index], self._parts.slice(*self.plan.bounds(index))


class Assembly:
    """A payload as it arrives, chunk by chunk in order, written straight into its destination.

    Args:
        into: writable, exactly plan.num_bytes; left alone by others as long as this is added to or read.
    """

    def __init__(self, into: memoryview, plan: ChunkPlan) -> None:
        self.plan = plan
        self._into = into.cast("B")
        self._state = xxhash.xxh3_64()
        self._digests: list[int] = []
        if self._into.nbytes != plan.num_bytes:
            raise WeightError(
                f"a destination of {into.nbytes} bytes for a payload of {plan.num_bytes}; they must be equal"
            )

    @property
    def num_ready(self) -> int:
        """Verified chunks in the destination."""
        return len(self._digests)

    @property
    def num_bytes(self) -> int:
        """Verified bytes in the destination."""
        return min(self.plan.num_bytes, self.num_ready * self.plan.chunk_bytes)

    @property
    def complete(self) -> bool:
        """Whether every chunk is there."""
        return self.num_ready == self.plan.num_chunks

    def add(self, digest: int, body: memoryview) -> bool:
        """Verify the next chunk, then keep it; False, with nothing kept, when size or digest are wrong."""
        start, end = self.plan.bounds(self.num_ready)
        if body.nbytes != end - start or not self._matches(digest, body):
            return False
        self._into[start:end] = body
        self._digests.append(digest)
        return True

    def next_chunk(self) -> memoryview:
        """Where the next chunk belongs; what is written there counts once `keep` has found it right."""
        return self._into[slice(*self.plan.bounds(self.num_ready))]

    def keep(self, digest: int) -> bool:
        """Verify what was written to `next_chunk`; False when it is wrong."""
        if not self._matches(digest, self.next_chunk()):
            return False
        self._digests.append(digest)
        return True

    def _matches(self, digest: int, body: memoryview) -> bool:
        state = self._state.copy()
        state.update(body)
        if state.intdigest() != digest:
            return False
        self._state = state
        return True

    def chunk(self, index: int) -> tuple[int, memoryview]:
        """As ChunkedPayload.chunk, of the chunks that are there.

        Raises:
            IndexError: it is not there.
        """
        if not 0 <= index < self.num_ready:
            raise IndexError(f"chunk {index}; {self.num_ready} of {self.plan.num_chunks} are there")
        return self._digests[index], self._into[slice(*self.plan.bounds(index))]
