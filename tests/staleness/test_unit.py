"""What of a group is left out when some of it is too old."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.staleness import Cut, Finished, Gate, StalenessUnit, WindowPolicy
from headway.staleness.unit import judge
from headway.types import DropReason, PolicyVersion, Sampling, Ticket

TRAJECTORY, TOKEN = StalenessUnit.TRAJECTORY, StalenessUnit.TOKEN
STALE, ABANDONED = DropReason.STALE, DropReason.ABANDONED_VERSION


def group(*members: tuple[int, ...]) -> Finished:
    """Per member, the steps that sampled it."""
    return Finished(0, {k: frozenset(PolicyVersion(0, step) for step in m) for k, m in enumerate(members)})


def nothing(version: PolicyVersion) -> bool:
    return False


def test_a_fresh_group_is_left_alone() -> None:
    for unit in StalenessUnit:
        assert not judge(group((4,), (4, 5), (5,)), 6, 2, unit, nothing)


def test_a_stale_member_goes_alone_while_two_fresh_ones_are_left() -> None:
    assert judge(group((3, 6), (4,), (5,)), 6, 2, TRAJECTORY, nothing) == Cut({0: STALE})
    assert judge(group((3, 6), (3,), (5,)), 6, 2, TRAJECTORY, nothing) == Cut(dropped=STALE)
    assert judge(group((3,)), 6, 2, TRAJECTORY, nothing) == Cut(dropped=STALE)


def test_by_token_only_what_is_too_old_is_masked() -> None:
    """A member goes when its newest token is too old; the others keep their fresh tokens."""
    assert judge(group((3, 6), (4,)), 6, 2, TOKEN, nothing) == Cut({}, 4)
    assert judge(group((3, 6), (2, 3), (5,)), 6, 2, TOKEN, nothing) == Cut({1: STALE}, 4)
    assert judge(group((3, 6), (2, 3)), 6, 2, TOKEN, nothing) == Cut(dropped=STALE)
    assert judge(group((3,), (3,)), 6, 2, TOKEN, nothing) == Cut(dropped=STALE)


@pytest.mark.parametrize("unit", StalenessUnit)
def test_a_member_of_a_rolled_back_step_goes_whole(unit: StalenessUnit) -> None:
    def abandoned(version: PolicyVersion) -> bool:
        return version.step == 5

    assert judge(group((4, 5), (4,), (6,)), 6, 2, unit, abandoned) == Cut({0: ABANDONED})
    assert judge(group((4, 5), (5,), (6,)), 6, 2, unit, abandoned) == Cut(dropped=ABANDONED)


@pytest.fixture
def late_gate() -> Callable[[StalenessUnit], Gate]:
    """A gate at step 6 with max_lag 2, whose tickets 0 and 1 hold three trajectories of five tokens each."""

    def make(unit: StalenessUnit) -> Gate:
        gate = Gate(WindowPolicy(2, 2), version=PolicyVersion(0, 6), unit=unit)
        for ticket_id in (0, 1):
            ticket = Ticket(ticket_id, 0, [1], 3, Sampling(1.0, 5, [2]), 0, PolicyVersion(0, 6), 60.0)
            gate.issued(ticket, "a")
            for _ in range(3):
                gate.ledger.receive(ticket_id, 5)
            gate.arrived(ticket_id)
        return gate

    return make


def test_the_gate_cuts_members_of_a_batch_and_drops_groups_without_two_fresh_ones(
    late_gate: Callable[[StalenessUnit], Gate],
) -> None:
    gate = late_gate(TRAJECTORY)
    fresh = Finished(1, group((5,), (6,), (6,)).members)
    selection = gate.select([group((3,), (5,), (6,)), fresh])
    assert (selection.take, selection.drop) == ([0, 1], [])
    assert selection.cuts == {0: Cut({0: STALE})}

    gate = late_gate(TRAJECTORY)
    selection = gate.select([group((3,), (3,), (6,)), fresh])
    assert (selection.take, selection.drop) == ([], [(0, STALE)])
    assert gate.counts().trajectories["dropped.stale"] == 3


def test_the_unit_can_be_changed_while_tickets_are_out(late_gate: Callable[[StalenessUnit], Gate]) -> None:
    gate = late_gate(TRAJECTORY)
    gate.change(unit=TOKEN)
    selection = gate.select([group((3, 4), (3, 6), (6,)), Finished(1, group((6,), (6,), (6,)).members)])
    assert selection.cuts == {0: Cut({}, 4)}
