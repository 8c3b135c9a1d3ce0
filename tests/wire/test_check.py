"""What the learner refuses at ingest, each with its reason, and what it only counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headway.types import FinishReason, PolicyVersion, Sampling, Ticket, Trajectory, VersionSpan
from headway.wire.check import SUSPICIOUS_ZEROS, suspicious_zeros, validate_trajectory


def with_logprob(value: float) -> np.ndarray:
    logprobs = np.where(np.arange(14) >= 5, -0.5, 0.0).astype(np.float32)
    logprobs[9] = value
    return logprobs


def test_a_good_trajectory_is_accepted(
    make_trajectory: Callable[..., Trajectory], make_ticket: Callable[..., Ticket]
) -> None:
    assert validate_trajectory(make_trajectory(), make_ticket()) is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.nan, "logprob_nan"),
        (np.inf, "logprob_inf"),
        (-np.inf, "logprob_inf"),
        (-9999.0, "logprob_floor"),
        (-1e30, "logprob_floor"),
        (0.3, "logprob_positive"),
        (1e-5, "logprob_positive"),
        (1e-7, None),
        (0.0, None),
        (-90.0, None),
    ],
)
def test_logprobs_that_are_none(
    make_trajectory: Callable[..., Trajectory],
    make_ticket: Callable[..., Ticket],
    value: float,
    reason: str | None,
) -> None:
    assert validate_trajectory(make_trajectory(logprobs=with_logprob(value)), make_ticket()) == reason


def test_nan_is_refused_where_the_mask_would_hide_it(
    make_trajectory: Callable[..., Trajectory], make_ticket: Callable[..., Ticket]
) -> None:
    logprobs = with_logprob(-0.5)
    logprobs[0] = np.nan
    assert validate_trajectory(make_trajectory(logprobs=logprobs), make_ticket()) == "logprob_nan"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs": None}, "logprob_missing"),
        ({"logprobs": np.array([None] * 14)}, "logprob_missing"),
        ({"logprobs": [-0.5] * 14}, "dtype"),
        ({"logprobs": np.zeros(14)}, "dtype"),
        ({"logprobs": np.zeros(13, dtype=np.float32)}, "lengths"),
        ({"loss_mask": np.zeros(13, dtype=bool)}, "lengths"),
        ({"loss_mask": np.ones(14, dtype=bool)}, "mask"),
        ({"spans": [VersionSpan(5, 13, PolicyVersion(0, 0))]}, "spans"),
        ({"ticket_id": 12}, "ticket"),
        ({"member": 4}, "member"),
        ({"prompt_index": 3}, "prompt_index"),
        ({"prompt_hash": 1}, "prompt_hash"),
        ({"token_ids": np.arange(14, dtype=np.int32)}, "prompt_hash"),
        ({"temperature": 1.0}, "temperature"),
        ({"finish_reason": FinishReason.ABORT}, "finish_abort"),
        ({"finish_reason": FinishReason.ERROR}, "finish_error"),
        ({"finish_reason": FinishReason.LENGTH}, None),
    ],
)
def test_refused_with_its_reason(
    make_trajectory: Callable[..., Trajectory],
    make_ticket: Callable[..., Ticket],
    changes: dict[str, object],
    reason: str | None,
) -> None:
    assert validate_trajectory(make_trajectory(**changes), make_ticket()) == reason


def test_the_prompt_is_the_tickets(
    make_trajectory: Callable[..., Trajectory], make_ticket: Callable[..., Ticket]
) -> None:
    assert validate_trajectory(make_trajectory(), make_ticket(prompt_ids=[3, 1, 4, 1, 6])) == "prompt_ids"


def test_ids_that_the_model_does_not_have(
    make_trajectory: Callable[..., Trajectory], make_ticket: Callable[..., Ticket]
) -> None:
    """Sampled ids are 7 to 15."""
    for vocab_size, reason in ((16, None), (15, "vocabulary"), (0, None)):
        assert validate_trajectory(make_trajectory(), make_ticket(vocab_size=vocab_size)) == reason


def test_the_budget_counts_sampled_tokens(
    make_trajectory: Callable[..., Trajectory], make_ticket: Callable[..., Ticket]
) -> None:
    for budget, reason in ((8, "budget"), (9, None)):
        sampling = Sampling(temperature=0.7, max_new_tokens=budget, stop_ids=[])
        assert validate_trajectory(make_trajectory(), make_ticket(sampling=sampling)) == reason


@pytest.mark.parametrize(("run", "suspicious"), [(SUSPICIOUS_ZEROS, False), (SUSPICIOUS_ZEROS + 1, True)])
@pytest.mark.parametrize("start", [5, 9, 25 - SUSPICIOUS_ZEROS - 1])
def test_padding_with_zeros_is_suspicious(
    make_trajectory: Callable[..., Trajectory], run: int, suspicious: bool, start: int
) -> None:
    logprobs = np.where(np.arange(25) >= 5, -0.5, 0.0).astype(np.float32)
    logprobs[start : start + run] = 0.0
    assert suspicious_zeros(make_trajectory(20, logprobs=logprobs)) is suspicious
    # Spread out, the same number of zeros is nothing to wonder about.
    logprobs[start + 4] = -1.0
    assert not suspicious_zeros(make_trajectory(20, logprobs=logprobs))
