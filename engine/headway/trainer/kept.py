"""Kept sets of a batch, in the order of its head rows: what the masked head scores each loss token over.

Legend: T head rows of a row, K kept ids of all of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.packing import Row
from headway.types import Trajectory

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KeptRows:
    """What each head row's token was sampled from.

    Attributes:
        offsets: int64 [T + 1] into ids, int64 [K]. A row without ids was sampled from the whole vocabulary.
    """

    offsets: Tensor
    ids: Tensor

    def to(self, device: torch.device) -> KeptRows:
        """The same on a device."""
        return KeptRows(self.offsets.to(device), self.ids.to(device))

    def over(self, vocab_size: int) -> KeptRows:
        """The same with every id written out, where a row has none."""
        counts = self.offsets.diff()
        whole = counts == 0
        if not bool(whole.any()):
            return self
        filled = torch.where(whole, vocab_size, counts)
        place = torch.repeat_interleave(filled)
        starts = filled.cumsum(0) - filled
        ids = torch.arange(len(place), device=place.device) - starts[place]
        ids[~whole[place]] = self.ids
        return KeptRows(torch.cat([filled.new_zeros(1), filled.cumsum(0)]), ids)


class KeptTable:
    """The kept sets of all trajectories of a batch, by number and position.

    Args:
        trajectories: in the order of the packing's numbers.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        lengths = np.array([t.num_tokens for t in trajectories], np.int64)
        self._first: Ints = np.cumsum(lengths) - lengths
        self._counts: Ints = np.zeros(int(lengths.sum()), np.int64)
        ids: list[NDArray[np.int32]] = []
        for first, trajectory in zip(self._first.tolist(), trajectories, strict=True):
            if trajectory.kept is not None:
                start = first + trajectory.prompt_length
                self._counts[start : first + trajectory.num_tokens] = trajectory.kept.counts
                ids.append(trajectory.kept.ids)
        self._ids: Ints = np.concatenate([np.zeros(0, np.int32), *ids]).astype(np.int64)
        self._starts: Ints = np.cumsum(self._counts) - self._counts

    def rows(self, row: Row) -> KeptRows:
        """Those of a row's loss tokens."""
        place = self._first[row.sequence] + row.token
        counts = self._counts[place]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        ids = self._ids[np.repeat(self._starts[place], counts) + within]
        return KeptRows(torch.from_numpy(offsets), torch.from_numpy(ids))
