"""The buffer: groups complete by count, refusals are visible, and the ledger knows every token."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.buffer import Arrival, Buffer
from headway.staleness import Gate, StalenessUnit, WindowPolicy
from headway.types import (
    DropReason,
    FinishReason,
    MemberFailure,
    PolicyVersion,
    Sampling,
    Ticket,
    Trajectory,
    VersionSpan,
)

ZERO = PolicyVersion(0, 0)


def ticket(ticket_id: int, num_members: int = 2) -> Ticket:
    return Ticket(ticket_id, ticket_id, [1, 2], num_members, Sampling(1.0, 4, [9]), 5, ZERO, 600.0)


def trajectory(
    ticket_id: int,
    member: int,
    num_tokens: int = 3,
    reward: float | None = 1.0,
    version: PolicyVersion = ZERO,
) -> Trajectory:
    length = 2 + num_tokens
    return Trajectory(
        trajectory_id=f"a.{ticket_id}.{member}",
        ticket_id=ticket_id,
        member=member,
        prompt_index=ticket_id,
        prompt_hash=0,
        prompt_length=2,
        token_ids=np.ones(length, np.int32),
        loss_mask=np.arange(length) >= 2,
        logprobs=np.full(length, -1.0, np.float32),
        spans=[VersionSpan(2, length, version)],
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        reward=reward,
        num_cached=0,
        started_s=0.0,
        finished_s=0.0,
    )


def failure(
    ticket_id: int, member: int, reason: str = DropReason.GENERATION_FAILED, tokens: int = 1
) -> MemberFailure:
    return MemberFailure(ticket_id, member, reason, "it broke", tokens)


def buffer_with(*tickets: Ticket, groups_per_step: int = 2, max_lag: int = 4) -> Buffer:
    """A buffer whose tickets are all out at generator "a"; its clock stands at 17 s."""
    buffer = Buffer(Gate(WindowPolicy(max_lag, groups_per_step)), clock=lambda: 17.0)
    for each in tickets:
        buffer.issued(each, "a")
    return buffer


def counts(buffer: Buffer) -> dict[str, dict[str, int]]:
    """The ledger's counts; the balance is checked."""
    got = buffer.gate.counts()
    return {"tickets": got.tickets, "trajectories": got.trajectories, "tokens": got.tokens}


def test_a_group_is_complete_when_every_member_has_arrived_or_failed() -> None:
    buffer = buffer_with(ticket(0, num_members=3))
    assert buffer.add(trajectory(0, 2), "a") == Arrival()
    assert buffer.fail(failure(0, 1), "a") == Arrival()
    group = buffer.add(trajectory(0, 0), "a").finished
    assert group is not None
    assert [member.member for member in group.trajectories] == [0, 2]
    assert [member.member for member in group.failures] == [1]
    assert (group.ticket_id, group.arrived_s, group.num_tokens) == (0, 17.0, 6)
    assert group.as_finished.members[0] == {ZERO}
    assert buffer.groups == [group]
    assert counts(buffer)["tokens"]["buffered"] == 6
    assert counts(buffer)["tickets"]["buffered"] == 1


@pytest.mark.parametrize(
    ("members", "ended"),
    [
        (["ok", "ok", "ok"], None),
        (["ok", "ok", "reward_failed"], None),
        (["ok", "reward_failed", "reward_failed"], "reward_failed"),
        (["ok", "reward_failed", "generation_failed"], "reward_failed"),
        (["generation_failed"] * 3, "generation_failed"),
        (["prompt_too_long"] * 3, "prompt_too_long"),
        (["ok", "ok", "deadline"], "deadline"),  # the survivors are its short members
        (["ok", "ok", "generator_lost"], "generator_lost"),
        (["ok", "no such reason", "no such reason"], "invalid"),
    ],
)
def test_groups_that_cannot_be_trained_end_with_their_reason(members: list[str], ended: str | None) -> None:
    buffer = buffer_with(ticket(0, num_members=3))
    arrival = Arrival()
    for member, fate in enumerate(members):
        if fate == "ok":
            arrival = buffer.add(trajectory(0, member), "a")
        else:
            arrival = buffer.fail(failure(0, member, fate), "a")
    assert arrival.ended == ended
    assert (arrival.finished is None) is (ended is not None)
    assert counts(buffer)["tickets"].get(f"dropped.{ended}", 0) == (ended is not None)
    if ended is not None:
        assert buffer.groups == []
        assert buffer.num_trajectories == 0
        assert counts(buffer)["tokens"]["buffered"] == 0


def test_a_group_of_one_needs_no_second_member() -> None:
    assert buffer_with(ticket(0, 1)).add(trajectory(0, 0), "a").finished is not None
    assert buffer_with(ticket(0, 1)).fail(failure(0, 0), "a").ended == DropReason.GENERATION_FAILED


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_member_without_a_finite_reward_is_a_counted_failure_and_not_a_zero(reward: float | None) -> None:
    buffer = buffer_with(ticket(0, 3))
    buffer.add(trajectory(0, 0, num_tokens=7, reward=reward), "a")
    buffer.add(trajectory(0, 1), "a")
    group = buffer.add(trajectory(0, 2), "a").finished
    assert group is not None
    assert [member.member for member in group.trajectories] == [1, 2]
    assert group.failures[0].reason == DropReason.REWARD_FAILED
    assert counts(buffer)["tokens"]["dropped.reward_failed"] == 7


def test_a_trajectory_that_fails_its_checks_is_a_failed_member() -> None:
    buffer = buffer_with(ticket(0, 2))
    buffer.add(trajectory(0, 0), "a")
    arrival = buffer.reject(trajectory(0, 1, num_tokens=4), "a", "logprobs: nan")
    assert arrival.ended == DropReason.INVALID
    assert counts(buffer)["tokens"]["dropped.invalid"] == 4 + 3
    assert buffer.reject(trajectory(0, 1), "a", "late").refused == DropReason.TICKET_CLOSED


def test_refusals_are_visible_and_counted() -> None:
    buffer = buffer_with(ticket(0), ticket(1))
    buffer.add(trajectory(0, 0), "a")
    assert buffer.add(trajectory(0, 0), "a").refused == DropReason.DUPLICATE
    assert buffer.fail(failure(0, 0), "a").refused == DropReason.DUPLICATE
    assert buffer.add(trajectory(0, 2), "a").refused == DropReason.INVALID
    assert buffer.add(trajectory(0, -1), "a").refused == DropReason.INVALID
    assert buffer.add(trajectory(0, 1), "b").refused == DropReason.UNKNOWN_TICKET  # not this producer's
    assert buffer.add(trajectory(2, 0), "a").refused == DropReason.UNKNOWN_TICKET
    buffer.drop(0, DropReason.DEADLINE)
    assert buffer.add(trajectory(0, 1), "a").refused == DropReason.TICKET_CLOSED
    assert buffer.fail(failure(0, 1), "a").refused == DropReason.TICKET_CLOSED
    got = counts(buffer)
    assert got["trajectories"] == {
        "received": 7,
        "trained": 0,
        "masked": 0,
        "dropped": 7,
        "dropped.deadline": 1,
        "dropped.duplicate": 1,
        "dropped.invalid": 2,
        "dropped.ticket_closed": 1,
        "dropped.unknown_ticket": 2,
        "buffered": 0,
        "failed": 1,
    }
    assert got["tokens"]["received"] == 7 * 3 + 1
    assert buffer.ticket(0) is None
    assert buffer.ticket(1) == ticket(1)


def test_2000_trajectories_for_unknown_tickets_leave_the_buffer_as_it_was() -> None:
    buffer = buffer_with(ticket(0))
    buffer.add(trajectory(0, 0), "a")
    for k in range(2000):
        assert buffer.add(trajectory(1 + k, 0), f"stranger {k}").refused == DropReason.UNKNOWN_TICKET
    assert buffer.num_trajectories == 1
    assert counts(buffer)["trajectories"]["dropped.unknown_ticket"] == 2000
    ledger = buffer.gate.ledger
    assert list(ledger.state().generators) == ["a"]
    assert buffer.add(trajectory(0, 1), "a").finished is not None


def test_take_hands_out_batches_oldest_first_and_drops_the_stale() -> None:
    buffer = buffer_with(*(ticket(k, 1) for k in range(5)), groups_per_step=2, max_lag=4)
    gate = buffer.gate
    assert buffer.take().groups == []
    for k in (3, 1, 0):
        buffer.add(trajectory(k, 0), "a")
    batch = buffer.take()
    assert [group.ticket_id for group in batch.groups] == [0, 1]
    assert [group.ticket_id for group in buffer.groups] == [3]
    gate.trained([0, 1], PolicyVersion(0, 1))
    gate.version = PolicyVersion(0, 5)
    batch = buffer.take()
    assert batch.groups == []
    assert [(group.ticket_id, reason) for group, reason in batch.dropped] == [(3, DropReason.STALE)]
    got = counts(buffer)
    assert (got["tokens"]["trained"], got["tokens"]["dropped.stale"]) == (6, 3)
    assert buffer.take(final=True).groups == []  # 2 and 4 still run
    buffer.fail(failure(2, 0), "a")
    buffer.add(trajectory(4, 0, version=PolicyVersion(0, 5)), "a")
    assert [group.ticket_id for group in buffer.take(final=True).groups] == [4]


def test_a_lost_generator_ends_its_unfinished_tickets_only() -> None:
    buffer = buffer_with(ticket(0, 1), ticket(1))
    buffer.issued(ticket(2), "b")
    buffer.add(trajectory(0, 0), "a")
    buffer.add(trajectory(1, 0), "a")
    assert buffer.lost("a") == [ticket(1)]
    assert [group.ticket_id for group in buffer.groups] == [0]
    assert buffer.ticket(2) is not None
    assert counts(buffer)["trajectories"]["dropped.generator_lost"] == 1


def test_close_ends_everything_and_the_ledger_closes() -> None:
    buffer = buffer_with(ticket(0, 1), ticket(1, 1), ticket(2), ticket(3, 1))
    for k in (0, 1, 3):
        buffer.add(trajectory(k, 0), "a")
    buffer.add(trajectory(2, 0), "a")
    assert len(buffer.take().groups) == 2  # in training, and never reported
    assert buffer.close() == [0, 1, 2, 3]
    got = counts(buffer)
    assert got["tickets"] == {
        "issued": 4,
        "trained": 0,
        "dropped": 4,
        "dropped.shutdown": 4,
        "in_flight": 0,
        "buffered": 0,
    }
    assert buffer.num_trajectories == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_arrivals_makes_the_same_groups(data: st.DataObject) -> None:
    """Members of several tickets, shuffled, some sent twice: each group holds each of its members once."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    arrivals = [(k, member) for k, size in enumerate(sizes) for member in range(size)]
    again = data.draw(st.lists(st.sampled_from(arrivals), max_size=4))
    order = data.draw(st.permutations(arrivals + again))
    buffer = buffer_with(*(ticket(k, size) for k, size in enumerate(sizes)))
    refused = sum(buffer.add(trajectory(k, member), "a").refused is not None for k, member in order)
    assert refused == len(again)
    assert [[t.member for t in group.trajectories] for group in buffer.groups] == [[*range(s)] for s in sizes]
    assert counts(buffer)["tickets"]["in_flight"] == 0


def spanning(member: int, *versions: int) -> Trajectory:
    """One token a version, given by its step."""
    spans = [VersionSpan(2 + k, 3 + k, PolicyVersion(0, step)) for k, step in enumerate(versions)]
    return msgspec.structs.replace(trajectory(0, member, num_tokens=len(versions)), spans=spans)


def late_buffer(unit: StalenessUnit, *members: Trajectory) -> Buffer:
    """One finished group, to be consumed by step 6 with max_lag 2."""
    gate = Gate(WindowPolicy(2, 1), version=PolicyVersion(0, 6), unit=unit)
    buffer = Buffer(gate, clock=lambda: 17.0)
    buffer.issued(ticket(0, len(members)), "a")
    for member in members:
        buffer.add(member, "a")
    return buffer


def test_a_stale_member_is_dropped_and_counted_and_the_fresh_ones_are_trained() -> None:
    buffer = late_buffer(StalenessUnit.TRAJECTORY, spanning(0, 3, 6, 6), spanning(1, 5, 6), spanning(2, 4))
    (group,) = buffer.take().groups
    assert [member.member for member in group.trajectories] == [1, 2]
    assert [(f.member, f.reason, f.num_tokens) for f in group.failures] == [(0, DropReason.STALE, 3)]
    buffer.gate.trained([0], PolicyVersion(0, 7), {0: (0, group.num_masked)})
    assert counts(buffer)["trajectories"] == {
        "received": 3, "trained": 2, "masked": 0, "dropped": 1, "dropped.stale": 1, "buffered": 0, "failed": 0
    }  # fmt: skip
    assert counts(buffer)["tokens"]["dropped.stale"] == 3


def test_one_fresh_member_alone_goes_with_its_group() -> None:
    buffer = late_buffer(StalenessUnit.TRAJECTORY, spanning(0, 3), spanning(1, 3), spanning(2, 6))
    batch = buffer.take()
    assert batch.groups == []
    assert [(group.ticket_id, reason) for group, reason in batch.dropped] == [(0, DropReason.STALE)]
    assert counts(buffer)["tickets"]["dropped.stale"] == 1


def test_by_token_the_old_ones_are_masked_and_stay_as_context() -> None:
    buffer = late_buffer(StalenessUnit.TOKEN, spanning(0, 3, 3, 4, 6), spanning(1, 6, 6), spanning(2, 3, 3))
    (group,) = buffer.take().groups
    assert [member.member for member in group.trajectories] == [0, 1]
    first = group.trajectories[0]
    assert first.loss_mask.tolist() == [False, False, False, False, True, True]
    assert first.num_tokens == 6
    assert all(lag <= 2 for lag in first.token_lags(6)[first.loss_mask[2:]])
    assert group.num_masked == 2
    buffer.gate.trained([0], PolicyVersion(0, 7), {0: (0, group.num_masked)})
    tokens = counts(buffer)["tokens"]
    assert (tokens["received"], tokens["trained"], tokens["masked"], tokens["dropped.stale"]) == (8, 4, 2, 2)
