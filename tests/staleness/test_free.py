"""The policies without a window: admission, selection, refusals, and what `wait` never lets happen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.staleness import POLICIES, CapacityPolicy, DropPolicy, WaitPolicy, WindowPolicy, make_policy
from headway.staleness.free import FreePolicy


def test_capacity_counts_accepted_and_running_against_the_newest_weights() -> None:
    """accepted + running <= (S + a + 1) P, with v P groups trained."""
    policy = CapacityPolicy(2, 4)
    for step, acked in ((0, 0), (1, 1), (100, 100), (100, 99), (100, 98)):
        for in_flight, buffered in ((0, 0), (5, 3), (12, 0)):
            accepted, running = step * 4 + buffered, in_flight
            room = (2 + acked + 1) * 4 - accepted - running
            assert policy.budget(step, acked, in_flight, buffered, {}) == max(0, room)
    assert CapacityPolicy(2, 4, slots=6).budget(0, 0, 0, 0, {}) == 6
    assert CapacityPolicy(2, 4, slots=99).slots == 12


def test_drop_admits_up_to_its_slots_whatever_they_are() -> None:
    assert DropPolicy(1, 4).slots == 8
    assert DropPolicy(1, 4, slots=99).budget(7, 7, 40, 9, {}) == 50


@pytest.mark.parametrize("kind", [CapacityPolicy, DropPolicy, WaitPolicy])
def test_weights_that_are_too_old_already_get_no_ticket(kind: type[FreePolicy]) -> None:
    policy = kind(2, 4)
    assert policy.budget(5, 3, 0, 0, {}) > 0
    assert policy.budget(5, 2, 0, 0, {}) == 0


@pytest.mark.parametrize("kind", [CapacityPolicy, DropPolicy, WaitPolicy])
def test_max_lag_0_is_the_synchronous_loop(kind: type[FreePolicy]) -> None:
    policy = kind(0, 4)
    assert policy.budget(3, 3, 0, 0, {}) == 4
    assert policy.budget(3, 2, 0, 0, {}) == 0  # the new weights are not acked
    assert policy.budget(3, 3, 1, 3, dict.fromkeys(range(4), 3)) == 0  # a round is whole or not there
    with pytest.raises(ConfigError, match="use at most 1"):
        kind(0, 4, push_interval=2)


def test_the_oldest_weights_are_trained_first() -> None:
    admitted = {7: 3, 8: 1, 9: 2, 10: 1}
    assert DropPolicy(4, 2).select(4, [7, 8, 9, 10], admitted) == [8, 10]
    assert DropPolicy(4, 2).select(4, [7], admitted) == [7]


def test_wait_holds_a_batch_back_for_a_group_that_the_next_step_could_not_take() -> None:
    policy = WaitPolicy(1, 2)
    admitted = {0: 0, 1: 0, 2: 1, 3: 1}
    assert policy.select(0, [1, 2], {0: 0, 1: 0, 2: 0, 3: 0}) == [1, 2]  # 0 and 3 fit into step 1
    assert policy.select(1, [1, 2, 3], admitted) == []  # 0 would be two steps old after this one
    assert policy.select(1, [0, 1, 2, 3], admitted) == [0, 1]
    assert DropPolicy(1, 2).select(1, [1, 2, 3], admitted) == [1, 2]


def test_wait_admits_for_old_weights_only_what_their_last_step_can_still_train() -> None:
    policy = WaitPolicy(2, 4)
    assert policy.budget(3, 3, 0, 0, {}) == 12
    assert policy.budget(3, 2, 0, 0, {}) == 8
    assert policy.budget(3, 1, 0, 0, {}) == 4
    assert policy.budget(3, 1, 3, 0, {0: 1, 1: 1, 2: 3}) == 2
    assert policy.budget(3, 1, 11, 0, dict.fromkeys(range(11), 3)) == 1  # the slots are full


@given(st.data())
def test_under_wait_nothing_outlives_max_lag_whatever_finishes_when(data: st.DataObject) -> None:
    """Any order of grants, finishes and acks: every group is trained within max_lag, and all can be."""
    max_lag, groups = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    policy = WaitPolicy(max_lag, groups, slots=data.draw(st.one_of(st.none(), st.integers(groups, 12))))
    admitted: dict[int, int] = {}
    finished: set[int] = set()
    step, issued = 0, 0
    for _ in range(40):
        acked = data.draw(st.integers(max(0, step - max_lag - 1), step))
        budget = policy.budget(step, acked, len(admitted) - len(finished), len(finished), admitted)
        for _ in range(data.draw(st.integers(0, budget))):
            admitted[issued] = acked
            issued += 1
        running = sorted(admitted.keys() - finished)
        finished |= set(data.draw(st.lists(st.sampled_from(running), unique=True))) if running else set()
        chosen = policy.select(step, finished, admitted)
        if len(chosen) < groups:
            continue
        for ticket_id in chosen:
            assert step - admitted.pop(ticket_id) <= max_lag
        finished -= set(chosen)
        step += 1
        assert all(step - at <= max_lag for at in admitted.values())
    while len(admitted) >= groups:  # everything finishes: nothing is stuck, nothing is late
        chosen = policy.select(step, admitted.keys(), admitted)
        assert len(chosen) == groups
        for ticket_id in chosen:
            assert step - admitted.pop(ticket_id) <= max_lag
        step += 1


def test_after_lowering_max_lag_nothing_waits_for_what_can_no_longer_be_trained() -> None:
    policy = WaitPolicy(4, 2).changed(max_lag=1)
    admitted = {0: 0, 1: 0, 2: 0, 3: 3, 4: 3}
    assert policy.select(3, [3, 4], admitted) == [3, 4]


def test_policies_are_made_by_name_and_refuse_what_is_not_theirs() -> None:
    assert POLICIES == ("window", "capacity", "drop", "wait")
    assert [type(make_policy(name, 2, 4)) for name in POLICIES] == [
        WindowPolicy, CapacityPolicy, DropPolicy, WaitPolicy
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="'fifo' is unknown; choose from window, capacity, drop, wait"):
        make_policy("fifo", 2, 4)
    for name in POLICIES[1:]:
        with pytest.raises(ConfigError, match="has no window"):
            make_policy(name, 2, 4, window=3)
        with pytest.raises(ConfigError, match="cannot fill a step of 4 groups"):
            make_policy(name, 2, 4, slots=3)
        with pytest.raises(ConfigError, match="use at most 3"):
            make_policy(name, 2, 4, push_interval=4)
        with pytest.raises(ConfigError, match="has no window"):
            make_policy(name, 2, 4).changed(window=3)
        assert make_policy(name, 2, 4, slots=8).changed(slots=0).slots == 12


def test_a_bound_that_cannot_be_reached_is_said() -> None:
    assert DropPolicy(2, 4).unreachable() == ""
    assert "staleness.slots = 4 is one batch" in DropPolicy(2, 4, slots=4).unreachable()
    assert "never overtake" in WaitPolicy(2, 4).unreachable(concurrent_groups=1)
    assert CapacityPolicy(0, 4).unreachable() == ""
