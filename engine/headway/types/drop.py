"""Why a ticket or a trajectory ended without being trained: one reason each."""

from __future__ import annotations

import enum


class DropReason(enum.StrEnum):
    """Every ticket ends as trained, or dropped with one of these.

    The first block ends tickets (and their members), the second only single trajectories.
    """

    PROMPT_TOO_LONG = "prompt_too_long"  # prompt fills or exceeds the context
    PROMPT_EMPTY = "prompt_empty"
    NO_BUDGET = "no_budget"  # zero new tokens allowed
    ROW_TOO_SHORT = "row_too_short"  # a member does not fit tokens_per_row
    DEADLINE = "deadline"  # the rollout deadline passed
    GENERATOR_LOST = "generator_lost"  # its generator died, froze or left
    GENERATION_FAILED = "generation_failed"  # the engine raised for every member
    REWARD_FAILED = "reward_failed"  # fewer than two members have a reward
    ZERO_VARIANCE = "zero_variance"  # all rewards equal: no gradient in it
    STALE = "stale"  # beyond max_lag at consumption
    INVALID = "invalid"  # failed the checks at ingest
    ABANDONED_VERSION = "abandoned_version"  # sampled by a step that a resume rolled back
    SHUTDOWN = "shutdown"  # unfinished when the run ended

    DUPLICATE = "duplicate"  # a trajectory id that was already received
    UNKNOWN_TICKET = "unknown_ticket"  # no such ticket, or not this producer's
    TICKET_CLOSED = "ticket_closed"  # arrived after its ticket had ended
