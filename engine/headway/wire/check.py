"""What a trajectory must satisfy: its layout (both ends of the wire) and its ticket's terms (ingest).

Called by the codec for every trajectory it encodes or decodes, and by the learner's intake before a
trajectory may enter the buffer. Pure; nothing is repaired, padded or clamped here.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.errors import WireError
from headway.types import FinishReason, Ticket, Trajectory, VersionSpan, prompt_digest

# A log-prob may exceed 0 by rounding; by more than this it is not a log-prob.
MAX_LOGPROB = 1e-6
# Some engines write -9999 for "not among the returned log-probs".
MIN_LOGPROB = -9999.0
# A sampled token has probability exactly 1 in fp32 now and then, not many times in a row: zeros are padding.
SUSPICIOUS_ZEROS = 8
_MAX_STEP = 1 << 31


class Layout(Protocol):
    """The fields that the layout check reads, on the wire head and on the trajectory alike."""

    @property
    def trajectory_id(self) -> str: ...
    @property
    def member(self) -> int: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def spans(self) -> list[VersionSpan]: ...
    @property
    def temperature(self) -> float: ...


def check_layout(item: Layout, length: int) -> None:
    """Refuse a trajectory of `length` tokens whose parts cannot belong together.

    Raises:
        WireError: "prompt" (not 1 <= prompt_length < length), "spans" (they do not cover
            [prompt_length, length) exactly, in order), "versions" (negative, beyond 2^31, or decreasing),
            "temperature" (not finite and > 0), "member" (negative).
    """
    if not 1 <= item.prompt_length < length:
        raise _fault(
            item,
            "prompt",
            f"prompt_length {item.prompt_length} with {length} tokens; expected 1 <= it < {length}",
        )
    if not 0.0 < item.temperature < math.inf:
        raise _fault(item, "temperature", f"temperature {item.temperature}; expected finite and > 0")
    if item.member < 0:
        raise _fault(item, "member", f"member {item.member}; expected >= 0")
    at = item.prompt_length
    last = None
    for span in item.spans:
        if span.start != at or span.end <= at:
            raise _fault(item, "spans", f"span [{span.start}, {span.end}) where one from {at} was expected")
        at = span.end
        version = span.version
        if not (0 <= version.step < _MAX_STEP and 0 <= version.epoch < _MAX_STEP):
            raise _fault(item, "versions", f"version {version}; expected 0 <= epoch, step < 2^31")
        if last is not None and version < last:
            raise _fault(item, "versions", f"version {version} after {last}; expected non-decreasing")
        last = version
    if at != length:
        raise _fault(item, "spans", f"spans end at {at}; expected {length}")


def _fault(item: Layout, reason: str, message: str) -> WireError:
    return WireError(reason, f"trajectory {item.trajectory_id[:80]!r}: {message}")


def validate_trajectory(trajectory: Trajectory, ticket: Ticket) -> str | None:
    """Why this trajectory must not be trained, or None when it may.

    Args:
        trajectory: as received; it may come from a producer in this process that never crossed the wire.
        ticket: the ticket that it names.

    Returns:
        A short reason for the counter of DropReason.INVALID: "lengths", "dtype", a reason of `check_layout`,
        "ticket", "member", "prompt_index", "prompt_hash", "prompt_ids", "mask", "budget", "temperature",
        "finish_abort", "finish_error", "vocabulary" (an id that the model does not have), "kept", "kept_missing",
        "kept_unasked", "logprob_missing", "logprob_nan", "logprob_inf", "logprob_positive", "logprob_floor".
    """
    return (
        _shape_fault(trajectory)
        or _ticket_fault(trajectory, ticket)
        or _vocabulary_fault(trajectory, ticket.vocab_size)
        or _kept_fault(trajectory, ticket)
        or logprob_fault(trajectory.logprobs, trajectory.loss_mask)
    )


def _shape_fault(t: Trajectory) -> str | None:
    # A producer in this process may hand over None or lists: what the annotations promise is checked here.
    arrays: list[Any] = [t.token_ids, t.loss_mask, t.logprobs]
    logprobs = arrays[2]
    if logprobs is None or (getattr(logprobs, "dtype", None) == np.object_ and None in logprobs.tolist()):
        return "logprob_missing"
    for array, dtype in zip(arrays, (np.int32, np.bool_, np.float32), strict=True):
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
            return "dtype"
    if not len(t.token_ids) == len(t.loss_mask) == len(t.logprobs):
        return "lengths"
    try:
        check_layout(t, len(t.token_ids))
    except WireError as fault:
        return fault.reason
    return "mask" if t.loss_mask[: t.prompt_length].any() else None


def _ticket_fault(t: Trajectory, ticket: Ticket) -> str | None:
    if t.ticket_id != ticket.ticket_id:
        return "ticket"
    if t.member >= ticket.num_members:
        return "member"
    if t.prompt_index != ticket.prompt_index:
        return "prompt_index"
    prompt = t.token_ids[: t.prompt_length]
    if t.prompt_hash != prompt_digest(prompt):
        return "prompt_hash"
    if prompt.tolist() != ticket.prompt_ids:
        return "prompt_ids"
    if int(np.count_nonzero(t.loss_mask)) > ticket.sampling.max_new_tokens:
        return "budget"
    if not math.isclose(t.temperature, ticket.sampling.temperature, rel_tol=1e-6):
        return "temperature"
    if t.finish_reason is FinishReason.ABORT:
        return "finish_abort"
    return "finish_error" if t.finish_reason is FinishReason.ERROR else None


def _vocabulary_fault(t: Trajectory, vocab_size: int) -> str | None:
    """An id beyond the head's rows would end the learner: there is no embedding of it."""
    if vocab_size == 0:
        return None
    arrays = [t.token_ids] if t.kept is None else [t.token_ids, t.kept.ids]
    within = all(int(ids.min(initial=0)) >= 0 and int(ids.max(initial=0)) < vocab_size for ids in arrays)
    return None if within else "vocabulary"


def _kept_fault(t: Trajectory, ticket: Ticket) -> str | None:
    """Kept sets are there where the ticket asks for them, and each sampled token is in its own, once."""
    kept = t.kept
    if kept is None:
        return "kept_missing" if ticket.sampling.keep_sets else None
    if not ticket.sampling.keep_sets:
        return "kept_unasked"
    for array in (kept.counts, kept.ids):
        if array.ndim != 1 or array.dtype != np.int32:
            return "dtype"
    counts = kept.counts.astype(np.int64)
    sampled = t.loss_mask[t.prompt_length :]
    if len(counts) != len(sampled) or (counts < sampled).any() or counts.sum() != len(kept.ids):
        return "kept"
    owner = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((kept.ids, owner))
    repeated = (np.diff(owner[order]) == 0) & (np.diff(kept.ids[order]) == 0)
    hits = np.bincount(owner[kept.ids == t.token_ids[t.prompt_length :][owner]], minlength=len(counts))
    sound = not repeated.any() and bool((hits[sampled] == 1).all()) and int(kept.ids.min(initial=0)) >= 0
    return None if sound else "kept"


def logprob_fault(logprobs: NDArray[np.float32], loss_mask: NDArray[np.bool_]) -> str | None:
    """Why these are no behaviour log-probs: finite everywhere, and in range where loss_mask is True."""
    if logprobs.size == 0:
        return None
    low, high = float(logprobs.min()), float(logprobs.max())  # NaN wherever there is one
    if low > MIN_LOGPROB and high <= MAX_LOGPROB:
        return None
    if not (math.isfinite(low) and math.isfinite(high)):
        return "logprob_nan" if math.isnan(low) else "logprob_inf"
    sampled = logprobs[loss_mask]
    if sampled.size == 0:
        return None
    if sampled.max() > MAX_LOGPROB:
        return "logprob_positive"
    return "logprob_floor" if sampled.min() <= MIN_LOGPROB else None


def suspicious_zeros(trajectory: Trajectory) -> bool:
    """Whether more than SUSPICIOUS_ZEROS consecutive sampled tokens have a log-prob of exactly 0.

    That is what log-probs padded with zeros look like. Such a trajectory is valid; the learner counts it.
    """
    completion = trajectory.logprobs[trajectory.prompt_length :]
    if completion.size - np.count_nonzero(completion) <= SUSPICIOUS_ZEROS:
        return False
    sampled = trajectory.logprobs[trajectory.loss_mask]
    if sampled.size <= SUSPICIOUS_ZEROS:
        return False
    other = np.flatnonzero(sampled != 0.0)
    edges = np.concatenate(([-1], other, [sampled.size]))
    return int(np.diff(edges).max()) - 1 > SUSPICIOUS_ZEROS
