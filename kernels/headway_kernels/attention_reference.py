"""Attention over a plan in plain PyTorch: what runs without the native library, any dtype and device.

Decode steps gather each run's keys. Other small problems are one scaled_dot_product_attention under a boolean
mask over the keys that are used at all; large ones go run by run. Differentiable by autograd. Called by
attention.run_attention.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from headway_kernels.attention_plan import AttentionPlan

DENSE_ELEMENTS = 4_000_000  # of the mask; beyond it the scores of one head would not fit a cache by far


def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """As attention.run_attention: [N, Hq, D], [M, Hkv, D] twice, plan -> [N, Hq, D]."""
    if plan.num_queries > 0 and bool((plan.query_len == 1).all()) and len(plan.query_len) > 0:
        return _gathered(query, key, value, plan, scale)
    memo = plan.memo
    if "queries" not in memo:
        memo["queries"], memo["keys"] = _used(plan)
    queries, keys = memo["queries"], memo["keys"]
    if len(queries) == 0:
        return torch.zeros_like(query) + 0.0 * query.sum() if query.requires_grad else torch.zeros_like(query)
    if len(queries) * len(keys) > DENSE_ELEMENTS:
        return _run_by_run(query, key, value, plan, scale)
    if "mask" not in memo:
        memo["mask"] = _dense_mask(plan, queries, keys)
    queries, keys, mask = (memo[name].to(query.device) for name in ("queries", "keys", "mask"))
    out = _attend(query[queries], key[keys], value[keys], mask, scale)
    return torch.zeros_like(query, memory_format=torch.contiguous_format).index_copy(0, queries, out)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """[n, Hq, D], [m, Hkv, D] twice, mask [n, m] -> [n, Hq, D]."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    heads = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    out = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale)
    return out.squeeze(0).transpose(0, 1)


def _spans(plan: AttentionPlan) -> list[tuple[int, int, list[tuple[int, int]], int, int]]:
    """Per filled run: first query, length, full ranges as (begin, end), causal start, causal base."""
    offsets = plan.range_offsets.tolist()
    begins, lengths = plan.range_start.tolist(), plan.range_len.tolist()
    rows = zip(
        *(t.tolist() for t in (plan.query_start, plan.query_len, plan.causal_start, plan.causal_base)),
        strict=True,
    )
    return [
        (q, n, [(begins[i], begins[i] + lengths[i]) for i in range(offsets[r], offsets[r + 1])], start, base)
        for r, (q, n, start, base) in enumerate(rows)
        if n > 0
    ]


def _used(plan: AttentionPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries that belong to a run and the keys that some run sees, both sorted."""
    queries, keys = np.zeros(plan.num_queries, dtype=bool), np.zeros(plan.num_keys, dtype=bool)
    for q, n, ranges, start, base in _spans(plan):
        queries[q : q + n] = True
        keys[start : start + base + n] = True
        for begin, end in ranges:
            keys[begin:end] = True
    return torch.from_numpy(np.flatnonzero(queries)), torch.from_numpy(np.flatnonzero(keys))


def _dense_mask(plan: AttentionPlan, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[used queries, used keys] bool. Used spans stay contiguous when the unused between them go."""
    row_of = np.zeros(plan.num_queries + 1, dtype=np.int64)
    row_of[queries.numpy()] = np.arange(len(queries))
    column_of = np.zeros(plan.num_keys + 1, dtype=np.int64)
    column_of[keys.numpy()] = np.arange(len(keys))
    mask = np.zeros((len(queries), len(keys)), dtype=bool)
    for q, n, ranges, start, base in _spans(plan):
        rows = mask[row_of[q] : row_of[q] + n]
        for begin, end in ranges:
            rows[:, column_of[begin] : column_of[begin] + (end - begin)] = True
        first = column_of[start]
        rows[:, first : first + base + n] = np.tri(n, base + n, base, dtype=bool)
    return torch.from_numpy(mask)


def _gathered(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Runs of one query each: their keys padded to the longest, by a key of their own (unused keys may be NaN)."""
    if "gather" not in plan.memo:
        spans = _spans(plan)
        lists = [
            np.concatenate([np.arange(b, e) for b, e in [*ranges, (start, start + base + 1)]])
            for _, _, ranges, start, base in spans
        ]
        index = np.stack([np.pad(keys, (0, max(map(len, lists)) - len(keys)), "edge") for keys in lists])
        seen = np.arange(index.shape[1]) < np.array([len(keys) for keys in lists])[:, None]
        plan.memo["gather"], plan.memo["seen"] = torch.from_numpy(index), torch.from_numpy(seen)
    index, seen, rows = (
        t.to(query.device) for t in (plan.memo["gather"], plan.memo["seen"], plan.query_start)
    )
    group = query.shape[1] // key.shape[1]
    heads = query[rows].unflatten(1, (key.shape[1], group))  # [R, Hkv, group, D]: a group shares its keys
    keys, values = (tensor[index].transpose(1, 2) for tensor in (key, value))
    out = scaled_dot_product_attention(heads, keys, values, attn_mask=seen[:, None, None, :], scale=scale)
    zeros = torch.zeros_like(query, memory_format=torch.contiguous_format)
    return zeros.index_copy(0, rows, out.flatten(1, 2))


def _run_by_run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    pieces: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    for q, n, ranges, start, base in _spans(plan):
        spans = [slice(begin, end) for begin, end in ranges if end > begin] + [slice(start, start + base + n)]
        keys, values = (torch.cat([tensor[s] for s in spans]) for tensor in (key, value))
        mask = None
        if n > 1:
            mask = torch.ones(n, len(keys), dtype=torch.bool, device=query.device)
            mask[:, len(keys) - (base + n) :] = torch.ones(n, base + n, dtype=torch.bool).tril(base)
        pieces.append(_attend(query[q : q + n], keys, values, mask, scale))
        places.append(torch.arange(q, q + n))
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    return out.index_copy(0, torch.cat(places).to(query.device), torch.cat(pieces))
