"""Kept sets on the wire: two more array frames, with messages of which a trajectory has them.

    frame 4   kept counts of all trajectories, int32
    frame 5   kept ids of all trajectories, int32

In a head the field `kept` of a trajectory holds the numbers of its elements in the two frames; it is left out where
the trajectory has none. Called by headway.wire.codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.errors import WireError
from headway.types import KeptSets, Trajectory
from headway.wire.arrays import Frame, plain_bytes, view

_INT32 = np.dtype("<i4")
NUM_FRAMES = 2


class KeptHead(msgspec.Struct, frozen=True):
    """KeptSets in a head: element counts in place of the arrays."""

    counts: int
    ids: int


class KeptItem(Protocol):
    """What is read of a trajectory's head."""

    @property
    def trajectory_id(self) -> str: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def token_ids(self) -> int: ...
    @property
    def kept(self) -> KeptHead | None: ...


def kept_frames(trajectories: Sequence[Trajectory]) -> list[bytes]:
    """The two frames; none where no trajectory has kept sets.

    Raises:
        WireError: "kept" (counts that do not fit the tokens or the ids), "dtype", "shape".
    """
    having = [(item, item.kept) for item in trajectories if item.kept is not None]
    if not having:
        return []
    for item, kept in having:
        num_sampled, total = len(item.token_ids) - item.prompt_length, int(kept.counts.sum())
        _check(item.trajectory_id, KeptHead(len(kept.counts), len(kept.ids)), num_sampled, total)
    counts: list[Any] = [plain_bytes(kept.counts, _INT32, "kept counts") for _, kept in having]
    ids: list[Any] = [plain_bytes(kept.ids, _INT32, "kept ids") for _, kept in having]
    return [b"".join(counts), b"".join(ids)]


def slice_kept(items: Sequence[KeptItem], frames: Sequence[Frame]) -> list[KeptSets | None]:
    """One per head, views of the two frames.

    Args:
        frames: none, or the two.

    Raises:
        WireError: "frames" (they came and no head names them, or the other way round), "lengths", "kept".
    """
    if any(item.kept is not None for item in items) != bool(frames):
        raise WireError("frames", f"{len(frames)} frames of kept sets came; the heads say otherwise")
    if not frames:
        return [None] * len(items)
    counts, ids = view(frames[0], _INT32), view(frames[1], _INT32)
    heads = [item.kept for item in items if item.kept is not None]
    named = (sum(head.counts for head in heads), sum(head.ids for head in heads))
    if named != (counts.size, ids.size) or min(min(head.counts, head.ids) for head in heads) < 0:
        raise WireError(
            "lengths", f"heads name {named} kept counts and ids; the frames hold {(counts.size, ids.size)}"
        )
    if min(int(counts.min(initial=0)), int(ids.min(initial=0))) < 0:
        raise WireError("kept", "a negative count or id among the kept sets")
    kept: list[KeptSets | None] = []
    count_at = id_at = 0
    for item in items:
        head = item.kept
        if head is None:
            kept.append(None)
            continue
        mine: NDArray[np.int32] = counts[count_at : count_at + head.counts]
        total = int(mine.sum(dtype=np.int64))
        _check(item.trajectory_id, head, item.token_ids - item.prompt_length, total)
        kept.append(KeptSets(mine, ids[id_at : id_at + head.ids]))
        count_at, id_at = count_at + head.counts, id_at + head.ids
    return kept


def _check(name: str, head: KeptHead, num_sampled: int, total: int) -> None:
    if head.counts != num_sampled or head.ids != total:
        raise WireError(
            "kept",
            f"{name[:80]!r} has {head.counts} counts for {num_sampled} tokens after its prompt, and {head.ids} ids "
            f"where the counts sum to {total}",
        )
