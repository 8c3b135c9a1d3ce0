"""Which updates a replay makes: the path through the attempts, and what the journal must hold of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headway.checkpoint import Attempt
from headway.errors import CheckpointError, JournalError
from headway.journal import BatchSelected, Entry, LiveChange, Opened, Position, Published, StepTrained
from headway.learner.replay_plan import Entered, Plan, Stretch, Update, path
from headway.types import PolicyVersion

V = PolicyVersion
# 0 was left at step 6 for 1, 1 at step 8 for 2; 3 went back to step 4 of 0.
ATTEMPTS = [Attempt(0), Attempt(1, "0.6", V(0, 6)), Attempt(2, "1.8", V(1, 8)), Attempt(3, "0.4", V(0, 4))]


def trained(epoch: int, step: int, *, skipped: bool = False) -> list[Entry]:
    ids = [10 * step, 10 * step + 1]
    batch = BatchSelected(step, ids, 0.0, [[f"g.{ticket}.0"] for ticket in ids], [0, 0])
    return [batch, StepTrained(V(epoch, step - skipped), ids, skipped)]


def attempt(epoch: int, first: int, last: int) -> list[Entry]:
    found: list[Entry] = [Opened("run", epoch, first, 0.0), Published(V(epoch, first), "d")]
    for step in range(first + 1, last + 1):
        found += [*trained(epoch, step), Published(V(epoch, step), "d")]
    return found


def plan_of(entries: Sequence[Entry], start: PolicyVersion, epoch: int, step: int | None) -> Plan:
    plan = Plan(start, path(ATTEMPTS, start, epoch, step))
    plan.read((Position(1, 24 + index), entry) for index, entry in enumerate(entries))
    return plan


def versions(plan: Plan) -> list[PolicyVersion]:
    return [event.version for event in plan.events if isinstance(event, Update)]


def test_the_path_follows_what_each_attempt_started_from() -> None:
    assert path(ATTEMPTS, V(0, 0), 2, None) == [Stretch(0, 0, 6), Stretch(1, 6, 8), Stretch(2, 8, None)]
    assert path(ATTEMPTS, V(1, 7), 2, 9) == [Stretch(1, 7, 8), Stretch(2, 8, 9)]
    assert path(ATTEMPTS, V(0, 4), 3, None) == [Stretch(0, 4, 4), Stretch(3, 4, None)]
    assert path(ATTEMPTS, V(0, 2), 0, 5) == [Stretch(0, 2, 5)]


@pytest.mark.parametrize(
    ("start", "epoch", "step"), [(V(1, 6), 3, None), (V(2, 8), 1, 8), (V(0, 5), 3, 9), (V(0, 5), 0, 3)]
)
def test_an_end_that_does_not_descend_from_the_start_is_refused(
    start: PolicyVersion, epoch: int, step: int | None
) -> None:
    with pytest.raises(CheckpointError, match=r"do not descend|was left before"):
        path(ATTEMPTS, start, epoch, step)


def test_what_was_rolled_back_is_passed_over() -> None:
    entries = [*attempt(0, 0, 7), *attempt(1, 6, 9), *attempt(2, 8, 10), *attempt(3, 4, 5)]
    plan = plan_of(entries, V(0, 0), 2, None)
    assert versions(plan) == [
        *(V(0, step) for step in range(1, 7)), V(1, 7), V(1, 8), V(2, 9), V(2, 10)
    ]  # fmt: skip
    assert [event.epoch for event in plan.events if isinstance(event, Entered)] == [0, 1, 2]
    pushed = [event.version for event in plan.events if isinstance(event, Published)]
    assert pushed == [*(V(0, step) for step in range(7)), *(V(1, step) for step in (6, 7, 8)),
                      *(V(2, step) for step in (8, 9, 10))]  # fmt: skip
    assert plan.wanted == plan.end == V(2, 10)
    assert versions(plan_of(entries, V(0, 0), 3, None)) == [*(V(0, step) for step in range(1, 5)), V(3, 5)]
    assert versions(plan_of(entries, V(0, 0), 1, 7)) == [*(V(0, step) for step in range(1, 7)), V(1, 7)]


def test_a_replay_from_a_checkpoint_begins_in_the_middle_of_its_attempt() -> None:
    entries = [*attempt(0, 0, 7)[8:], *attempt(1, 6, 9)]  # from after step 3's push's predecessor on
    first = next(entry.step for entry in entries if isinstance(entry, BatchSelected))
    plan = plan_of(entries, V(0, first - 1), 1, None)
    assert versions(plan)[0] == V(0, first)
    assert plan.end == V(1, 9)


def test_changes_and_skipped_steps_keep_their_places() -> None:
    change = LiveChange(1, "learner.lr", "0.5")
    entries = [
        Opened("run", 0, 0, 0.0), *trained(0, 1), change, *trained(0, 2, skipped=True), *trained(0, 2)
    ]  # fmt: skip
    plan = plan_of(entries, V(0, 0), 0, None)
    assert [type(event).__name__ for event in plan.events] == [
        "Entered", "Update", "LiveChange", "Update", "Update"
    ]  # fmt: skip
    assert [event.skipped for event in plan.events if isinstance(event, Update)] == [False, True, False]
    assert plan.end == V(0, 2)


def test_a_batch_that_was_never_trained_is_not() -> None:
    cut = trained(0, 1)[:1]
    plan = plan_of([Opened("run", 0, 0, 0.0), *cut], V(0, 0), 0, None)
    assert plan.num_updates == 0
    entries = [Opened("run", 0, 0, 0.0), *(trained(0, 1)[0], Opened("run", 0, 0, 0.0), trained(0, 1)[1])]
    with pytest.raises(JournalError, match="a batch that the journal does not have"):
        plan_of(entries, V(0, 0), 0, None)


def test_what_is_missing_is_named() -> None:
    plan = plan_of(attempt(0, 0, 3), V(0, 0), 0, 5)
    with pytest.raises(JournalError, match=r"leads to version 0\.3; 0\.5 was asked for"):
        plan.check([])
    plan = plan_of(attempt(0, 0, 1), V(0, 0), 0, 1)
    with pytest.raises(JournalError, match=r"step 1 trained 1 trajectories .* g\.11\.0"):
        plan.check(["g.10.0"])
    plan.check(["g.10.0", "g.11.0"])


def test_a_batch_without_the_names_of_its_trajectories_is_refused() -> None:
    entries = [Opened("run", 0, 0, 0.0), BatchSelected(1, [7], 0.0), StepTrained(V(0, 1), [7], False)]
    with pytest.raises(JournalError, match="an older headway recorded it"):
        plan_of(entries, V(0, 0), 0, None)
