"""A CPU stand-in for `flash_attn_varlen_func`, which TRL's asynchronous trainer calls on its prefix trees.

Each of S segments holds the queries of one stretch of the tree; its keys are the whole path from the
root. Masks are aligned bottom-right: the last query of a segment sees all the keys of its path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

# Up to this many query-key pairs one dense masked call is faster than a call per segment (both were timed
# on two cores: short rows have hundreds of segments of a token or two).
DENSE_PAIRS = 2_000_000


def varlen_attention(
    query_QHD: torch.Tensor,
    key_KhD: torch.Tensor,
    value_KhD: torch.Tensor,
    bounds_q: torch.Tensor,
    bounds_k: torch.Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    **_: Any,
) -> torch.Tensor:
    """Causal attention within segments; the signature is flash-attn's.

    Args:
        query_QHD: [Q, heads, head_dim].
        key_KhD, value_KhD: [K, kv heads, head_dim], gathered per segment.
        bounds_q, bounds_k: [S + 1] int32, where each segment begins.

    Returns:
        [Q, heads, head_dim].
    """
    if not causal or window_size != (-1, -1):
        raise NotImplementedError(
            f"causal full attention only, got causal={causal}, window_size={window_size}"
        )
    if query_QHD.shape[0] * key_KhD.shape[0] <= DENSE_PAIRS:
        mask_QK = segment_mask(bounds_q, bounds_k)
        return _attend(query_QHD, key_KhD, value_KhD, mask_QK, softmax_scale)
    outputs: list[torch.Tensor] = []
    edges_q, edges_k = bounds_q.tolist(), bounds_k.tolist()
    for index in range(len(edges_q) - 1):
        queries = slice(edges_q[index], edges_q[index + 1])
        keys = slice(edges_k[index], edges_k[index + 1])
        num_q, num_k = queries.stop - queries.start, keys.stop - keys.start
        mask_QK = None if num_q == num_k else torch.ones(num_q, num_k, dtype=torch.bool).tril(num_k - num_q)
        outputs.append(_attend(query_QHD[queries], key_KhD[keys], value_KhD[keys], mask_QK, softmax_scale))
    return torch.cat(outputs)


def segment_mask(bounds_q: torch.Tensor, bounds_k: torch.Tensor) -> torch.Tensor:
    """[Q, K] bool: query and key are of one segment, and the key is not later than the query."""
    lengths_q, lengths_k = bounds_q.diff().long(), bounds_k.diff().long()
    segments = torch.arange(len(lengths_q))
    segment_q, segment_k = segments.repeat_interleave(lengths_q), segments.repeat_interleave(lengths_k)
    place_q = (
        torch.arange(len(segment_q)) - bounds_q[:-1].long()[segment_q] + (lengths_k - lengths_q)[segment_q]
    )
    place_k = torch.arange(len(segment_k)) - bounds_k[:-1].long()[segment_k]
    return (segment_q[:, None] == segment_k[None]) & (place_k[None] <= place_q[:, None])


def _attend(
    query_QHD: torch.Tensor,
    key_KhD: torch.Tensor,
    value_KhD: torch.Tensor,
    mask_QK: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    output_1HQD = scaled_dot_product_attention(
        query_QHD.transpose(0, 1)[None],
        key_KhD.transpose(0, 1)[None],
        value_KhD.transpose(0, 1)[None],
        attn_mask=mask_QK,
        is_causal=mask_QK is None,
        scale=scale,
        enable_gqa=True,
    )
    return output_1HQD[0].transpose(0, 1)
