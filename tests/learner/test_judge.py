"""Which finished groups are worth a place: flat ones within the bound, those too long for a row never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headway.buffer import Group
from headway.config import RunConfig
from headway.learner.judge import GroupJudge
from headway.types import PolicyVersion, Sampling, Ticket, Trajectory

Config = Callable[..., RunConfig]
MakeTrajectory = Callable[..., Trajectory]


@pytest.fixture
def group_of(make_trajectory: MakeTrajectory) -> Callable[..., Group]:
    def make(ticket_id: int, rewards: list[float | None], **changes: Any) -> Group:
        ticket = Ticket(
            ticket_id, ticket_id, [3, 4], len(rewards), Sampling(1.0, 8, [2]), 1, PolicyVersion(0, 0), 60.0
        )
        members = [make_trajectory(ticket, k, reward=reward, **changes) for k, reward in enumerate(rewards)]
        return Group(ticket, members, [], 0.0)

    return make


def test_flat_groups_are_replaced_up_to_the_bound_of_each_step(
    tiny_config: Config, group_of: Callable[..., Group]
) -> None:
    judge = GroupJudge(tiny_config(batch={"prompts": 4}, algo={"max_replacements": 0.5}))
    flat = [group_of(k, [1.0, 1.0]) for k in range(5)]
    varied = group_of(7, [0.0, 1.0])
    assert judge.flat([flat[0], varied]) == [0]
    assert judge.flat([flat[1], flat[2], varied]) == [1]  # 2 = half of 4
    assert judge.flat([flat[2], varied]) == []
    judge.step_done()
    assert judge.flat([flat[2], flat[3], flat[4]]) == [3, 4]  # 2 was kept for good
    judge.step_done()
    assert judge.flat([flat[2]]) == []


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        ([0.0, 0.0], True),
        ([1.0, 1.0 + 1e-9], True),
        ([0.0, 1e-3], False),
        ([1.0, None], False),
        ([0, 0, 1], False),
    ],
)
def test_flat_means_equal_up_to_rounding(
    tiny_config: Config, group_of: Callable[..., Group], rewards: list[float | None], flat: bool
) -> None:
    judge = GroupJudge(tiny_config())
    assert judge.flat([group_of(0, rewards)]) == ([0] if flat else [])


def test_without_the_filter_nothing_is_replaced(tiny_config: Config, group_of: Callable[..., Group]) -> None:
    judge = GroupJudge(tiny_config(algo={"filter_zero_variance": False}))
    assert judge.flat([group_of(0, [1.0, 1.0])]) == []


def test_a_row_must_hold_what_is_forwarded_not_the_last_token(
    tiny_config: Config, group_of: Callable[..., Group]
) -> None:
    group = group_of(0, [0.0, 1.0], tokens=(5, 6, 7))  # 5 tokens, of which 4 are forwarded
    assert not GroupJudge(tiny_config(batch={"tokens_per_row": 4}, sampling={"max_new_tokens": 2})).too_long(
        group
    )
    judge = GroupJudge(tiny_config(batch={"tokens_per_row": 3}, sampling={"max_new_tokens": 2}))
    assert judge.too_long(group)
    assert "a trajectory of 5 tokens exceeds batch.tokens_per_row = 3" in judge.too_long_message(group)
