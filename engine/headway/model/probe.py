"""A probe of the architecture: a few tokens through headway's attention and head, against the model's own.

A module that does not take its attention from the registry ignores the AttentionContext without a word, and a
head that is more than a linear map gives other logits. Both would look like staleness in a run, so they are
refused when the model is loaded. So does a back-end whose kernel aligns its mask otherwise: two of the sequences share
a prefix, which a learner forwards once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import HeadwayError, ModelError
from headway.model.attention import ATTENTION_NAME
from headway.model.policy import Policy
from headway.packing import PackGroup, Row, pack

SHARED, LENGTHS = 2, (4, 4, 3)  # the first two start alike; all are shorter than any sliding window
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of the largest logit, by the dtype of layers and head: rounding stays below, a wrong mask or head far above."""


@dataclass(frozen=True)
class _Sequence:
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    prompt_length: int = 1


@torch.no_grad()
def probe(policy: Policy) -> None:
    """Compare three packed sequences with the module's own forward of each.

    Raises:
        ModelError: they differ, or the module cannot be called as headway calls it.
    """
    name = type(policy.module).__name__
    sequences = _sequences(policy.vocab_size)
    (row,) = pack([PackGroup(0, sequences)], sum(LENGTHS), "tree").rows
    try:
        expected = _own_logits(policy, sequences, row)
        found = policy.head.logits(_packed(policy, row))
    except (HeadwayError, TypeError, ValueError, KeyError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelError(
            f"{name} cannot be run with headway's attention: {type(error).__name__}: {error}"
        ) from error
    largest, apart = float(expected.abs().max()), float((found - expected).abs().max())
    if not apart <= max(TOLERANCE[policy.dtype], TOLERANCE[policy.head.dtype]) * largest:
        raise ModelError(
            f"{name} does not give its own logits with headway's attention ({policy.attention.name!r}) and head "
            f"(difference {apart:.1e}, largest logit {largest:.1e}): it takes its attention, positions or logits "
            "from elsewhere; use an architecture with transformers' attention interface"
        )


def _sequences(vocab_size: int) -> list[_Sequence]:
    draw = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(vocab_size, (length,), generator=draw).numpy().astype(np.int32) for length in LENGTHS
    ]
    ids[1][:SHARED] = ids[0][:SHARED]
    return [_Sequence(each, np.arange(len(each)) > 0) for each in ids]


def _own_logits(policy: Policy, sequences: list[_Sequence], row: Row) -> Tensor:
    """[T, V], of the row's head rows."""
    policy.module.set_attn_implementation("eager")
    try:
        own = [
            policy.module(
                input_ids=torch.from_numpy(each.token_ids.astype(np.int64)).to(policy.device)[None],
                use_cache=False,
            ).logits[0].float()
            for each in sequences
        ]  # fmt: skip
    finally:
        policy.module.set_attn_implementation(ATTENTION_NAME)
    return torch.stack([own[q][token - 1] for q, token in zip(row.sequence, row.token, strict=True)])


def _packed(policy: Policy, row: Row) -> Tensor:
    ids, positions, heads = (
        torch.from_numpy(array).to(policy.device)
        for array in (row.token_ids, row.position_ids, row.hidden_index)
    )
    return policy.backbone(ids, positions, policy.context(row))[heads]
