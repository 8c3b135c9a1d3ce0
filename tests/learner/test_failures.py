"""Too many failures stop a run with the first cause; rewards that are all 0 warn."""

from __future__ import annotations

import pytest

from headway.errors import TrainingStopped
from headway.learner.failures import ZERO_BATCHES, FailureWatch, RewardWatch
from headway.types import DropReason


def test_failures_in_a_row_stop_and_name_the_first() -> None:
    watch = FailureWatch(limit=3)
    watch.note("the first")
    watch.note("the second")
    watch.ended(DropReason.REWARD_FAILED)
    watch.ended(DropReason.ZERO_VARIANCE)  # no failure
    watch.ended(DropReason.GENERATOR_LOST)  # nor this
    watch.ended(DropReason.INVALID)
    with pytest.raises(TrainingStopped, match=r"last 3 groups .* deadline; .* the first$"):
        watch.ended(DropReason.DEADLINE)


def test_a_group_that_can_be_trained_starts_the_count_anew() -> None:
    watch = FailureWatch(limit=2)
    for _ in range(5):
        watch.ended(DropReason.GENERATION_FAILED)
        watch.finished()


def test_rewards_of_0_warn_once_every_so_many_batches() -> None:
    watch = RewardWatch()
    lines = [watch.observe(0.0, 0.0) for _ in range(2 * ZERO_BATCHES)]
    assert [i + 1 for i, line in enumerate(lines) if line] == [ZERO_BATCHES, 2 * ZERO_BATCHES]
    assert watch.observe(0.1, 0.3) == ""
    assert not any(watch.observe(0.0, 0.0) for _ in range(ZERO_BATCHES - 1))
