"""The decode batch: the state of all running sequences as arrays, one row a sequence.

Arrays rather than objects, so that one decode step costs a fixed number of vector operations however many
sequences run.

Legend: S rows in use, C columns (the largest budget of any running sequence).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headway.generate.protocol import GroupRequest
from headway.generate.seeds import mix
from headway.types import PolicyVersion, VersionSpan

Ints = NDArray[np.int64]


@dataclass
class RunningGroup:
    """A group whose prompt is in the pool, or on its way there.

    Attributes:
        prompt_start: of the prompt's region; prefilled: prompt tokens whose KV is written.
        written: int32 [prompt_length], index of the version that wrote each one's KV.
        open_members: members not yet finished; the prompt's region is released with the last.
        kept: what each member's tokens were sampled from, where the request asks for it.
    """

    request: GroupRequest
    prompt_start: int
    started_s: float
    stop_row: int
    prefilled: int = 0
    open_members: set[int] = field(default_factory=set[int])
    kept: dict[int, list[NDArray[np.int32]]] = field(default_factory=dict[int, list[NDArray[np.int32]]])
    written: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.written = np.zeros(self.prompt_length, np.int32)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)


class DecodeBatch:
    """Rows of running sequences; row order is the order of admission and stays stable as others leave."""

    _COLUMNS = (
        "group", "member", "prompt_start", "prompt_length", "own_start", "count", "budget", "seed", "stop_row",
        "ready", "cached", "behind",
    )  # fmt: skip

    def __init__(self) -> None:
        self.size = 0
        self.group: Ints = np.zeros(0, np.int64)
        self.member: Ints = np.zeros(0, np.int64)
        self.prompt_start: Ints = np.zeros(0, np.int64)
        self.prompt_length: Ints = np.zeros(0, np.int64)
        self.own_start: Ints = np.zeros(0, np.int64)
        self.count: Ints = np.zeros(
            0, np.int64
        )  # tokens sampled so far; the last of them is not in the pool yet
        self.budget: Ints = np.zeros(0, np.int64)
        self.seed: Ints = np.zeros(0, np.int64)
        self.stop_row: Ints = np.zeros(0, np.int64)
        self.ready: Ints = np.zeros(0, np.int64)  # 1: the prompt is in the pool, so the row decodes
        self.cached: Ints = np.zeros(0, np.int64)  # own tokens in the pool
        self.behind: Ints = np.zeros(0, np.int64)  # own tokens to be forwarded again before the row is ready
        self.inv_temperature: NDArray[np.float32] = np.zeros(0, np.float32)
        self.tokens: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self.logprobs: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self.versions: NDArray[np.int32] = np.zeros((0, 0), np.int32)  # that sampled each token
        self.written: NDArray[np.int32] = np.zeros((0, 0), np.int32)  # that wrote its KV, if it is cached

    def admit(self, group: RunningGroup, own_starts: Sequence[int]) -> None:
        """Add a row for each member of a group; `own_starts`: of their regions."""
        request, sampling = group.request, group.request.sampling
        start, end = self.size, self.size + len(request.members)
        self._reserve(end, sampling.max_new_tokens)
        rows: dict[str, int | list[int]] = {
            "group": request.request_id,
            "member": list(request.members),
            "prompt_start": group.prompt_start,
            "prompt_length": group.prompt_length,
            "own_start": list(own_starts),
            "budget": sampling.max_new_tokens,
            "seed": [mix(request.seed, member) for member in request.members],
            "stop_row": group.stop_row,
        }
        for name in self._COLUMNS:
            getattr(self, name)[start:end] = rows.get(name, 0)
        self.inv_temperature[start:end] = np.inf if sampling.temperature == 0 else 1.0 / sampling.temperature
        self.size = end

    def _reserve(self, num_rows: int, width: int) -> None:
        if num_rows > len(self.group):
            capacity = max(64, 2 * len(self.group), num_rows)
            for name in (*self._COLUMNS, "inv_temperature"):
                old = getattr(self, name)
                grown = np.zeros(capacity, old.dtype)
                grown[: len(old)] = old
                setattr(self, name, grown)
        capacity, columns = len(self.group), max(width, self.tokens.shape[1])
        if self.tokens.shape != (capacity, columns):
            for name in ("tokens", "logprobs", "versions", "written"):
                old = getattr(self, name)
                grown = np.zeros((capacity, columns), old.dtype)
                grown[: old.shape[0], : old.shape[1]] = old
                setattr(self, name, grown)

    def record(self, rows: Ints, tokens: Ints, logprobs: NDArray[np.float32], version: int) -> None:
        """Append one sampled token to each of `rows`."""
        at = self.count[rows]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version
        self.count[rows] = at + 1

    def spans(self, row: int, versions: Sequence[PolicyVersion]) -> list[VersionSpan]:
        """Which of `versions` sampled a row's tokens, at their places in the sequence."""
        count, prompt = int(self.count[row]), int(self.prompt_length[row])
        sampled_by = self.versions[row, :count]
        edges = [0, *(np.flatnonzero(np.diff(sampled_by)) + 1).tolist(), count]
        return [
            VersionSpan(prompt + start, prompt + end, versions[int(sampled_by[start])])
            for start, end in itertools.pairwise(edges)
        ]

    def forwarded(self, rows: Ints, version: int) -> None:
        """The last token of each of `rows` is being written to the pool."""
        self.written[rows, self.count[rows] - 1] = version
        self.cached[rows] = self.count[rows]

    def restart(self) -> None:
        """Nothing of any row is cached any more."""
        self.cached[: self.size] = 0
        self.behind[: self.size] = 0
        self.ready[: self.size] = 0

    def prompt_cached(self, group: int) -> Ints:
        """A group's prompt is in the pool; the rows that can sample from its last token.

        Rows that have sampled before are behind instead, or, with one token that was never cached, ready.
        """
        mine = np.flatnonzero(self.group[: self.size] == group)
        fresh = mine[self.count[mine] == 0]
        self.behind[mine] = np.maximum(0, self.count[mine] - 1)
        self.ready[mine] = self.behind[mine] == 0
        return fresh

    def restore(self, row: int, size: int, version: int) -> None:
        """`size` more of a row's own tokens are in the pool again."""
        done = int(self.cached[row])
        self.written[row, done : done + size] = version
        self.cached[row] += size
        self.behind[row] -= size
        self.ready[row] = self.behind[row] == 0

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the rows [S] whose mask is False."""
        kept = np.flatnonzero(mask)
        size = len(kept)
        for name in (*self._COLUMNS, "inv_temperature", "tokens", "logprobs", "versions", "written"):
            array = getattr(self, name)
            array[:size] = array[kept]
        self.size = size
