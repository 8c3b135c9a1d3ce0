"""The window policy: defaults, refusals, admission and selection, and an adversary that seeks the bound."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from headway.errors import ConfigError
from headway.staleness import WindowPolicy


@pytest.mark.parametrize(
    ("max_lag", "groups", "window", "slots"),
    [
        (0, 1, 1, 1),
        (0, 8, 1, 8),
        (1, 8, 1, 16),
        (2, 8, 1, 24),
        (3, 8, 9, 24),
        (4, 8, 17, 24),
        (4, 1, 3, 3),
        (8, 4, 17, 20),
    ],
)
def test_defaults(max_lag: int, groups: int, window: int, slots: int) -> None:
    policy = WindowPolicy(max_lag, groups)
    assert (policy.window, policy.slots) == (window, slots)


def test_explicit_window_and_slots_are_kept_and_too_many_slots_have_no_effect() -> None:
    policy = WindowPolicy(4, 8, window=9, slots=12)
    assert (policy.window, policy.slots) == (9, 12)
    assert WindowPolicy(4, 8, window=9, slots=1000).slots == 32


@pytest.mark.parametrize(
    ("arguments", "path", "nearest"),
    [
        ({"max_lag": -1, "groups_per_step": 1}, "staleness.max_lag", "at least 0"),
        ({"max_lag": 1, "groups_per_step": 0}, "groups_per_step", "at least 1"),
        ({"max_lag": 1, "groups_per_step": 4, "window": 0}, "staleness.window", "at least 1"),
        ({"max_lag": 0, "groups_per_step": 4, "window": 2}, "staleness.window", "at most 1, or max_lag >= 1"),
        (
            {"max_lag": 2, "groups_per_step": 4, "window": 10},
            "staleness.window",
            "at most 9, or max_lag >= 3",
        ),
        (
            {"max_lag": 0, "groups_per_step": 4, "push_interval": 2},
            "push.interval",
            "at most 1, or max_lag >= 1",
        ),
        (
            {"max_lag": 4, "groups_per_step": 4, "push_interval": 5},
            "push.interval",
            "at most 3, or max_lag >= 6",
        ),
        ({"max_lag": 4, "groups_per_step": 4, "slots": 3}, "staleness.slots", ">= 4"),
    ],
)
def test_impossible_combinations_are_refused_with_the_nearest_valid_ones(
    arguments: dict[str, int], path: str, nearest: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        WindowPolicy(**arguments)
    ((found, message),) = caught.value.faults
    assert found == path
    assert nearest in message


def test_the_nearest_valid_values_are_valid_and_the_next_ones_are_not() -> None:
    assert WindowPolicy(2, 4, window=9).slots == 4
    assert WindowPolicy(3, 4, window=10).slots == 7
    assert WindowPolicy(4, 4, push_interval=3).slots == 12
    assert WindowPolicy(6, 4, window=9, push_interval=5).slots == 20
    with pytest.raises(ConfigError):
        WindowPolicy(5, 4, window=9, push_interval=5)


def test_a_slot_returns_only_to_a_generator_that_acked_the_step() -> None:
    policy = WindowPolicy(1, 4)  # 8 slots
    assert policy.budget(step=0, acked_step=0, in_flight=0, buffered=0, admitted={}) == 8
    assert policy.budget(step=0, acked_step=0, in_flight=5, buffered=3, admitted={}) == 0
    assert (
        policy.budget(step=1, acked_step=0, in_flight=4, buffered=0, admitted={}) == 0
    )  # trained, not yet acked
    assert policy.budget(step=1, acked_step=1, in_flight=4, buffered=0, admitted={}) == 4
    assert policy.budget(step=3, acked_step=0, in_flight=0, buffered=0, admitted={}) == 0
    assert policy.budget(step=1, acked_step=1, in_flight=3, buffered=0, admitted={}) == 5  # dropped: back


def test_fewer_slots_bound_the_outstanding_tickets() -> None:
    policy = WindowPolicy(4, 4, window=1, slots=6)
    assert policy.budget(0, 0, 0, 0, {}) == 6
    assert policy.budget(0, 0, 4, 2, {}) == 0
    assert policy.budget(1, 0, 2, 0, {}) == 4
    assert policy.budget(5, 0, 0, 0, {}) == 0


def test_max_lag_0_grants_in_whole_rounds() -> None:
    policy = WindowPolicy(0, 4)
    assert policy.budget(0, 0, 0, 0, {}) == 4
    assert (
        policy.budget(0, 0, 1, 2, {}) == 0
    )  # one ended as zero variance, one still runs: no replacement yet
    assert policy.budget(0, 0, 0, 3, {}) == 1
    assert policy.budget(1, 0, 0, 0, {}) == 0  # the new weights are not acked
    assert policy.budget(1, 1, 0, 0, {}) == 4


def test_resume_does_not_open_the_gate_wide() -> None:
    """At step 100 with nothing outstanding: (max_lag + 1) * P at most, not 101 * P."""
    for max_lag in (0, 1, 4):
        policy = WindowPolicy(max_lag, 8)
        assert 8 <= policy.budget(100, 100, 0, 0, {}) <= (max_lag + 1) * 8


def test_selection_is_oldest_first_inside_the_window() -> None:
    policy = WindowPolicy(4, 2, window=4)
    assert policy.select(0, [7, 3, 5], held([3, 4, 5, 6, 7])) == [3, 5]
    assert policy.select(0, [5, 6, 7], held([3, 4, 5, 6, 7])) == [5, 6]  # 3 runs: up to index 6
    assert policy.select(0, [6, 7], held([3, 4, 5, 6, 7])) == [6]  # 7 must wait for 3
    assert policy.select(0, [6, 7], held([4, 5, 6, 7])) == [6, 7]  # 3 ended: the foot moved
    assert policy.select(0, [], held([3])) == []
    assert policy.select(0, [], held([])) == []


def test_the_foot_moves_within_a_batch() -> None:
    assert WindowPolicy(2, 3, window=1).select(0, [0, 1, 2, 3], held([0, 1, 2, 3])) == [0, 1, 2]
    assert WindowPolicy(2, 3, window=1).select(0, [0, 2, 3], held([0, 1, 2, 3])) == [0]


def test_a_narrower_window_can_be_imposed_and_a_wider_one_cannot() -> None:
    policy = WindowPolicy(4, 2, window=4)
    assert policy.select(0, [6], held([3, 6]), width=3) == []
    assert policy.select(0, [7], held([3, 7]), width=9) == []


def test_change_keeps_defaults_following_max_lag_and_refuses_the_impossible() -> None:
    policy = WindowPolicy(1, 4)
    assert policy.changed(max_lag=4).window == 9
    assert WindowPolicy(4, 4, window=2).changed(max_lag=6).window == 2
    assert policy.changed(slots=5).slots == 5
    with pytest.raises(ConfigError):
        WindowPolicy(4, 4, window=9).changed(max_lag=1)
    assert repr(policy.changed(push_interval=2)).endswith("push_interval=2, slots=8)")


def held(ticket_ids: Iterable[int]) -> dict[int, int]:
    """Outstanding tickets; the step that they were admitted for is of no account to a window."""
    return dict.fromkeys(ticket_ids, 0)


def adversary_lag(policy: WindowPolicy, stall: int) -> int:
    """The lag of ticket `stall` when it finishes as late as it can, everything else at once, acks at once.

    Plays the policy itself, group by group; -1 when the ticket is never out together with a full batch.
    """
    step, admitted, unended, admitted_at = 0, 0, [], {}
    while step < stall // policy.groups_per_step + policy.max_lag + 3:
        for _ in range(policy.budget(step, step, len(unended), 0, {})):
            unended.append(admitted)
            admitted_at[admitted] = step
            admitted += 1
        batch = policy.select(step, [index for index in unended if index != stall], held(unended))
        if len(batch) < policy.groups_per_step:  # nothing goes on without it: it finishes
            batch = policy.select(step, unended, held(unended))
            assert len(batch) == policy.groups_per_step
        if stall in batch:
            return step - admitted_at[stall]
        unended = [index for index in unended if index not in batch]
        step += 1
    raise AssertionError(f"{policy}: ticket {stall} was never trained")


GRID = [
    (bound, p, w)
    for bound in range(6)
    for p in (1, 2, 3, 5)
    for w in (1, 2, 3, 4, 6, 7, 11)
    if w <= 1 + p * bound
]


@pytest.mark.parametrize(("bound", "groups", "window"), GRID)
def test_the_bound_holds_and_is_tight(bound: int, groups: int, window: int) -> None:
    """Equality wherever there are more slots than a batch needs; else nothing is ever overtaken."""
    policy = WindowPolicy(bound, groups, window=window)
    assert policy.slots == (bound + 1) * groups - (window - 1)
    worst = max(adversary_lag(policy, stall) for stall in range(2 * (policy.slots + groups)))
    assert worst == (bound if policy.slots > groups else 0)
    assert worst == policy.reachable_lag()


@pytest.mark.parametrize("slots", range(3, 13))
@pytest.mark.parametrize("window", [1, 2, 4, 7])
def test_reachable_lag_is_what_an_adversary_reaches_with_fewer_slots(slots: int, window: int) -> None:
    policy = WindowPolicy(5, 3, window=window, slots=slots)
    assert max(adversary_lag(policy, stall) for stall in range(40)) == policy.reachable_lag()


def test_an_unreachable_bound_is_said_at_start_up() -> None:
    assert WindowPolicy(8, 4).unreachable() == ""
    few = WindowPolicy(8, 4, window=1, slots=8)
    assert few.reachable_lag() == 1
    assert few.unreachable() == (
        "the bound cannot be reached: staleness.max_lag = 8, but staleness.slots = 8 limits lag to 1; "
        "36 would reach it"
    )
    assert "window of at most 8" in WindowPolicy(2, 4, window=9).unreachable()
    assert WindowPolicy(2, 4, window=8).unreachable() == ""
    assert "decode 1 group at once limit lag to 1" in WindowPolicy(2, 4, window=5).unreachable(
        concurrent_groups=1
    )
    assert WindowPolicy(0, 4).unreachable(concurrent_groups=1) == ""
