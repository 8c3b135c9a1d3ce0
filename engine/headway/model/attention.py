"""Attention of both sides: one implementation, plugged into transformers through its attention registry.

The module calls `headway_attention` for every layer. What a query may see is not in a mask but in the
AttentionContext, passed through the model's keyword arguments: the learner's rows attend over themselves, the
generator's tokens over a KV pool into which this step's keys and values are written first.

Legend: N tokens of the call, M keys, Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headway.errors import UnsupportedOption
from headway.packing import Row
from headway_kernels.attention import AttentionPlan, run_attention

ATTENTION_NAME = "headway"


@dataclass(frozen=True)
class KVPool:
    """Keys and values of all layers: `keys` and `values` are [layers, pool tokens, Hkv, D]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class AttentionContext:
    """What the tokens of one forward call may see.

    Attributes:
        plan: the runs of queries and the keys each attends to.
        pool: None when queries attend over the call's own keys (learner).
        positions: int64 [N], where in the pool each token's key and value are written (with a pool).
    """

    plan: AttentionPlan
    pool: KVPool | None = None
    positions: Tensor | None = None


def attention_context(row: Row) -> AttentionContext:
    """A learner's row attends over itself, along its prefix forest."""
    arrays = (
        row.query_start, row.query_len, row.causal_start, row.causal_base,
        row.range_offsets, row.range_start, row.range_len,
    )  # fmt: skip
    tensors = [torch.from_numpy(array) for array in arrays]
    return AttentionContext(AttentionPlan(*tensors, num_queries=row.num_tokens, num_keys=row.num_tokens))


def headway_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention. query [1, Hq, N, D], key and value [1, Hkv, N, D] -> [1, N, Hq, D].

    Raises:
        UnsupportedOption: the call carries no context, or the layer asks for soft-capped attention or sinks.
    """
    context: AttentionContext | None = kwargs.get("context")
    if context is None:
        raise UnsupportedOption(
            "attention 'headway' needs an AttentionContext: call the model through headway.model.Policy, "
            "or load it with attn_implementation='sdpa'"
        )
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise UnsupportedOption("attention 'headway' has no soft-capped logits and no attention sinks")
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if context.pool is not None:
        layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
        pool_keys, pool_values = context.pool.keys[layer], context.pool.values[layer]
        pool_keys.index_copy_(0, context.positions, keys)  # pyright: ignore[reportArgumentType]
        pool_values.index_copy_(0, context.positions, values)  # pyright: ignore[reportArgumentType]
        keys, values = pool_keys, pool_values
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = run_attention(query[0].transpose(0, 1), keys, values, context.plan, scale=scale)
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, headway_attention)
