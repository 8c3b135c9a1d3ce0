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
from headway.model.row_attention import Attend
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
        plan: the runs of queries and the keys each attends to; None: attend says it.
        pool: None when queries attend over the call's own keys (learner).
        positions: int64 [N], where in the pool each token's key and value are written (with a pool).
        attend: a learner's row, bound to its back-end.
    """

    plan: AttentionPlan | None
    pool: KVPool | None = None
    positions: Tensor | None = None
    attend: Attend | None = None


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
    if torch.is_autocast_enabled(query.device.type):  # rotary positions have made float32 of what was not
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if context.pool is not None:
        layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
        pool_keys, pool_values = context.pool.keys[layer], context.pool.values[layer]
        pool_keys.index_copy_(0, context.positions, keys)  # pyright: ignore[reportArgumentType]
        pool_values.index_copy_(0, context.positions, values)  # pyright: ignore[reportArgumentType]
        keys, values = pool_keys, pool_values
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if context.attend is not None:
        return context.attend(queries, keys, values, scale).unsqueeze(0), None
    assert context.plan is not None, "a context without a plan has a row's attention"
    return run_attention(queries, keys, values, context.plan, scale=scale).unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, headway_attention)
