"""Requests that an engine can never serve: each is refused with the reason it is counted under."""

from __future__ import annotations

from headway.generate.protocol import GroupRequest, Unservable
from headway.types import DropReason


def check_servable(
    request: GroupRequest, *, context_length: int, vocab_size: int, pool_tokens: int, max_running: int
) -> None:
    """Refuse what would never fit, however long it waited.

    Args:
        context_length, vocab_size: of the model; pool_tokens: of the whole KV pool; max_running: sequences.

    Raises:
        Unservable: empty prompt, no budget, prompt and budget beyond the context, a group beyond the pool or the
            batch, or ids outside the vocabulary.
    """
    length, budget = len(request.prompt_ids), request.sampling.max_new_tokens
    name = f"request {request.request_id}"
    if length == 0:
        raise Unservable(DropReason.PROMPT_EMPTY, f"{name}: the prompt is empty")
    if budget <= 0:
        raise Unservable(DropReason.NO_BUDGET, f"{name}: max_new_tokens is {budget}")
    if length + budget > context_length:
        raise Unservable(
            DropReason.PROMPT_TOO_LONG,
            f"{name}: {length} prompt tokens + {budget} new ones exceed the context of {context_length}",
        )
    num_members = len(request.members)
    if length + budget * num_members > pool_tokens or num_members > max_running:
        raise Unservable(
            DropReason.PROMPT_TOO_LONG,
            f"{name}: a group of {num_members} x {budget} + {length} tokens exceeds the pool of "
            f"{pool_tokens} tokens, {max_running} sequences; raise generator.kv_tokens or generator.max_running",
        )
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
        raise Unservable(DropReason.INVALID, f"{name}: prompt ids outside the vocabulary")
