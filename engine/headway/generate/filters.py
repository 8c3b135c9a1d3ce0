"""top-k, top-p and min-p: for evaluation only, because they change the support that a ratio is taken over."""

from __future__ import annotations

from collections.abc import Mapping

import torch
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


def filter_rows(logits: Tensor, owners: Ints, groups: Mapping[int, RunningGroup]) -> None:
    """filter_logits in place, for the rows of groups that restrict the support.

    Args:
        logits: fp32 [S, V]; owners: the request id of each row [S]; groups: by request id.
    """
    for request_id, group in groups.items():
        if has_filter(group.request.sampling):
            mine = torch.from_numpy(owners == request_id)
            logits[mine] = filter_logits(logits[mine], group.request.sampling)
