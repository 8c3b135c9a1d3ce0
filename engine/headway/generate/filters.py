"""top-k, top-p and min-p. They change the support that a ratio is taken over: trained on over kept sets only."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.generate.batch import RunningGroup
from headway.generate.plan import Ints
from headway.types import Sampling


def has_filter(sampling: Sampling) -> bool:
    """Whether `sampling` restricts the support."""
    return sampling.top_k is not None or sampling.top_p is not None or sampling.min_p is not None


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """-inf outside the kept set. logits fp32 [N, V] -> [N, V].

    The kept set is the intersection of: the top_k largest; the smallest set of largest probabilities (at the
    sampling temperature) whose sum reaches top_p (Holtzman et al. 2020); probabilities of at least min_p times
    the largest (Nguyen et al. 2024). The largest is always kept.
    """
    scaled = logits / sampling.temperature if sampling.temperature > 0 else logits
    probability = torch.softmax(scaled, -1)
    keep = torch.ones_like(logits, dtype=torch.bool)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        keep &= scaled >= torch.topk(scaled, sampling.top_k, -1).values[..., -1:]
    if sampling.min_p is not None:
        keep &= probability >= sampling.min_p * probability.amax(-1, keepdim=True)
    if sampling.top_p is not None:
        ordered, order = torch.sort(probability, -1, descending=True)
        before = ordered.cumsum(-1) - ordered
        keep &= torch.zeros_like(keep).scatter(-1, order, before < sampling.top_p)
    return logits.masked_fill(~keep, float("-inf"))


def kept_ids(filtered: Tensor) -> list[NDArray[np.int32]]:
    """The kept set of each row of filtered logits [N, V], ascending."""
    rows, ids = (filtered != float("-inf")).nonzero(as_tuple=True)
    if filtered.shape[0] == 0:
        return []
    counts = torch.bincount(rows, minlength=filtered.shape[0])
    return np.split(ids.numpy().astype(np.int32), counts.cumsum(0)[:-1].tolist())


def filter_groups(logits: Tensor, groups: Iterable[RunningGroup], group_of: Ints, member_of: Ints) -> None:
    """Filter the rows of `logits` [S, V] in place, as their groups want it; the kept sets go to their groups.

    Args:
        group_of, member_of: [S], request and member of each row.
    """
    for group in groups:
        sampling = group.request.sampling
        if not has_filter(sampling):
            continue
        mine = group_of == group.request.request_id
        filtered = filter_logits(logits[torch.from_numpy(mine)], sampling)
        logits[torch.from_numpy(mine)] = filtered
        if sampling.keep_sets:
            for member, ids in zip(member_of[mine].tolist(), kept_ids(filtered), strict=True):
                group.kept.setdefault(member, []).append(ids)
