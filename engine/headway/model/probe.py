"""A probe of the architecture: a few tokens through headway's attention and head, against the model's own.

A module that does not take its attention from the registry ignores the AttentionContext without a word, and a
head that is more than a linear map gives other logits. Both would look like staleness in a run, so they are
refused when the model is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.errors import HeadwayError, ModelError
from headway.model.attention import ATTENTION_NAME, AttentionContext
from headway.model.policy import Policy
from headway_kernels.attention import AttentionPlan

LENGTHS = (4, 3)  # shorter than any sliding window
TOLERANCE = 1e-4  # of the largest logit: fp32 rounding stays far below, a wrong mask or head far above


@torch.no_grad()
def probe(policy: Policy) -> None:
    """Compare two packed sequences with the module's own forward of each.

    Raises:
        ModelError: they differ, or the module cannot be called as headway calls it.
    """
    name = type(policy.module).__name__
    draw = torch.Generator().manual_seed(0)
    sequences = [torch.randint(policy.vocab_size, (length,), generator=draw) for length in LENGTHS]
    try:
        expected = _own_logits(policy, sequences)
        found = policy.head.logits(_packed(policy, sequences))
    except (HeadwayError, TypeError, ValueError, KeyError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelError(
            f"{name} cannot be run with headway's attention: {type(error).__name__}: {error}"
        ) from error
    largest = float(expected.abs().max())
    if not float((found - expected).abs().max()) <= TOLERANCE * largest:
        raise ModelError(
            f"{name} does not give its own logits with headway's attention and head (difference "
            f"{float((found - expected).abs().max()):.1e}, largest logit {largest:.1e}): it takes its attention, "
            "positions or logits from elsewhere; use an architecture with transformers' attention interface"
        )


def _own_logits(policy: Policy, sequences: list[Tensor]) -> Tensor:
    policy.module.set_attn_implementation("eager")
    try:
        return torch.cat(
            [policy.module(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]
        )
    finally:
        policy.module.set_attn_implementation(ATTENTION_NAME)


def _packed(policy: Policy, sequences: list[Tensor]) -> Tensor:
    num_tokens = sum(LENGTHS)
    runs = [(start, length, start, 0, []) for start, length in zip((0, LENGTHS[0]), LENGTHS, strict=True)]
    plan = AttentionPlan.build(runs, num_queries=num_tokens, num_keys=num_tokens)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return policy.backbone(torch.cat(sequences), positions, AttentionContext(plan))
