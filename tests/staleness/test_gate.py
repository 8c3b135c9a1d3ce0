"""The gate: the check at consumption, one optimizer step per batch, lineage, loss of generators, live
changes.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.staleness import Finished, Gate, Ledger, WindowPolicy
from headway.types import (
    DropReason,
    FinishReason,
    PolicyVersion,
    Sampling,
    Ticket,
    Trajectory,
    VersionSpan,
)


def version(step: int, epoch: int = 0) -> PolicyVersion:
    return PolicyVersion(epoch, step)


def ticket(ticket_id: int, admitted: PolicyVersion) -> Ticket:
    return Ticket(ticket_id, 0, [1], 2, Sampling(1.0, 4, [2]), 7, admitted, 600.0)


def finished(ticket_id: int, versions: Iterable[PolicyVersion]) -> Finished:
    """A group of one trajectory."""
    return Finished(ticket_id, {0: frozenset(versions)})


class Play:
    """A gate with one generator "a", whose groups finish at once or when told."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.finished: dict[int, Finished] = {}

    def issue(self) -> list[int]:
        """Grant all of the budget to a generator that has acked the newest version."""
        acked = self.gate.version
        first = self.gate.ledger.next_ticket_id
        ids = range(first, first + self.gate.budget(acked))
        for ticket_id in ids:
            self.gate.issued(ticket(ticket_id, acked), "a")
        return list(ids)

    def finish(self, *ticket_ids: int, versions: tuple[PolicyVersion, ...] = ()) -> None:
        for ticket_id in ticket_ids:
            self.gate.ledger.receive(ticket_id, 5)
            self.gate.arrived(ticket_id)
            self.finished[ticket_id] = finished(ticket_id, versions or (self.gate.version,))

    def step(self) -> tuple[list[int], list[tuple[int, DropReason]]]:
        """Select and train."""
        selection = self.gate.select(self.finished.values())
        for ticket_id, _ in selection.drop:
            del self.finished[ticket_id]
        if selection.take:
            for ticket_id in selection.take:
                del self.finished[ticket_id]
            self.gate.trained(selection.take, version(self.gate.step + 1, self.gate.version.epoch))
        self.gate.counts()
        return selection.take, selection.drop


def test_time_in_the_queue_is_lag_and_is_checked_at_consumption() -> None:
    """A group that was fresh when it arrived is 5 steps old 5 steps later: dropped at max_lag 4."""
    for max_lag in (4, 5):
        play = Play(Gate(WindowPolicy(max_lag, 1, window=1)))
        play.issue()
        play.finish(0)
        play.gate.version = version(5)  # steps that trained other work
        take, drop = play.step()
        assert (take, drop) == (([], [(0, DropReason.STALE)]) if max_lag == 4 else ([0], []))
        assert play.gate.counts().tokens["dropped"] == (5 if max_lag == 4 else 0)


def test_the_oldest_token_decides() -> None:
    """Versions 3,3,3,4,4,4,4,7,7,7 consumed at 8: worst lag 5, mean 3.4."""
    spans = [VersionSpan(1, 4, version(3)), VersionSpan(4, 8, version(4)), VersionSpan(8, 11, version(7))]
    tokens = Trajectory(
        trajectory_id="a.0.0",
        ticket_id=0,
        member=0,
        prompt_index=0,
        prompt_hash=0,
        prompt_length=1,
        token_ids=np.zeros(11, np.int32),
        loss_mask=np.arange(11) > 0,
        logprobs=np.zeros(11, np.float32),
        spans=spans,
        temperature=1.0,
        finish_reason=FinishReason.STOP,
        reward=1.0,
        num_cached=0,
        started_s=0.0,
        finished_s=0.0,
    )
    assert (tokens.lag(8), tokens.token_lags(8).mean()) == (5, 3.4)
    group = finished(0, [span.version for span in tokens.spans])
    assert group.lag(8) == 5
    for max_lag, taken in ((5, True), (4, False)):
        gate = Gate(WindowPolicy(max_lag, 1), version=version(8))
        gate.issued(ticket(0, version(3)), "a")
        gate.arrived(0)
        selection = gate.select([group])
        assert (selection.take == [0]) is taken
        assert (selection.drop == [(0, DropReason.STALE)]) is not taken


def test_max_lag_0_trains_only_its_own_version() -> None:
    play = Play(Gate(WindowPolicy(0, 2)))
    assert play.issue() == [0, 1]
    play.finish(0, versions=(version(0),))
    assert play.step() == ([], [])
    play.finish(1, versions=(version(0),))
    assert play.step() == ([0, 1], [])
    assert play.gate.budget(version(0)) == 0
    assert play.issue() == [2, 3]
    play.finish(2, 3, versions=(version(0), version(1)))  # spans two versions
    assert play.step() == ([], [(2, DropReason.STALE), (3, DropReason.STALE)])
    assert play.issue() == [4, 5]


def test_one_optimizer_step_per_batch() -> None:
    """A second step on the same batch, or a jump of versions, is refused."""
    play = Play(Gate(WindowPolicy(0, 2)))
    play.issue()
    play.finish(0, 1)
    take = play.gate.select(play.finished.values()).take
    with pytest.raises(AssertionError, match="one optimizer step per batch"):
        play.gate.trained(take, version(4))
    play.gate.trained(take, version(1))
    with pytest.raises(AssertionError, match="ended already"):
        play.gate.trained(take, version(2))


def test_a_skipped_step_ends_its_batch_and_keeps_the_version() -> None:
    play = Play(Gate(WindowPolicy(1, 2)))
    play.issue()
    play.finish(0, 1, 2, 3)
    play.gate.trained([0, 1], version(0))
    assert play.issue() == [4, 5]
    del play.finished[0], play.finished[1]
    assert play.step() == ([2, 3], [])


def test_masked_work_is_counted_apart() -> None:
    play = Play(Gate(WindowPolicy(0, 1)))
    play.issue()
    play.finish(0)
    play.gate.trained([0], version(1), masked={0: (0, 2)})
    tokens = play.gate.counts().tokens
    assert (tokens["trained"], tokens["masked"]) == (3, 2)


def test_samples_of_abandoned_steps_are_dropped() -> None:
    """Epoch 0 was left at step 10, epoch 1 (from 8) was rolled back entirely, epoch 2 runs at 12."""
    gate = Gate(WindowPolicy(9, 1, window=1), version=version(12, 2), lineage=[version(10, 0)])
    fates = {
        version(10, 0): None,
        version(11, 0): DropReason.ABANDONED_VERSION,
        version(9, 1): DropReason.ABANDONED_VERSION,
        version(11, 2): None,
        version(13, 2): DropReason.ABANDONED_VERSION,  # weights that do not exist
    }
    for ticket_id, (sampled, reason) in enumerate(fates.items()):
        gate.issued(ticket(ticket_id, sampled), "a")
        gate.arrived(ticket_id)
        selection = gate.select([finished(ticket_id, [sampled])])
        assert selection.drop == ([] if reason is None else [(ticket_id, reason)])
        if reason is None:
            gate.dropped(ticket_id, DropReason.ZERO_VARIANCE)
    assert gate.budget(version(12, 1)) == 0  # another epoch must take the resumed weights first
    assert gate.budget(version(12, 2)) > 0


def test_resume_counts_what_is_still_outstanding() -> None:
    play = Play(Gate(WindowPolicy(1, 4)))
    for _ in range(100):
        issued = play.issue()
        play.finish(*issued)
        play.step()
    state = play.gate.ledger.state()
    resumed = Gate(play.gate.policy, Ledger(state), version(100, 1), [version(100)])
    assert resumed.ledger.buffered == 4
    assert resumed.budget(version(100, 1)) == 4


def test_a_lost_generator_holds_no_slots_and_blocks_nobody() -> None:
    """Two generators; "b" dies with the window's foot: the others' groups are trained at once."""
    gate = Gate(WindowPolicy(1, 2, window=1))
    for ticket_id in range(4):
        gate.issued(ticket(ticket_id, version(0)), "b" if ticket_id in (0, 3) else "a")
    for ticket_id in (1, 2):
        gate.arrived(ticket_id)
    groups = [finished(ticket_id, [version(0)]) for ticket_id in (1, 2)]
    assert gate.select(groups).take == []
    assert gate.lost("b") == [0, 3]
    assert gate.lost("b") == []
    assert gate.select(groups).take == [1, 2]
    assert gate.budget(version(0)) == 2
    assert gate.counts().dropped == {"generator_lost": 2}


def test_a_straggler_past_its_deadline_moves_the_window() -> None:
    play = Play(Gate(WindowPolicy(2, 2, window=3)))
    play.issue()
    play.finish(1, 2)
    assert play.step()[0] == [1, 2]
    play.finish(3)
    play.issue()
    play.finish(4)
    assert play.step() == ([], [])  # 0 still runs, and 3 and 4 are 3 or more ahead of it
    play.gate.dropped(0, DropReason.DEADLINE)
    assert play.step() == ([3, 4], [])


def test_a_short_batch_is_only_the_last() -> None:
    gate = Gate(WindowPolicy(1, 3))
    for ticket_id in range(2):
        gate.issued(ticket(ticket_id, version(0)), "a")
    gate.arrived(1)
    groups = [finished(1, [version(0)])]
    assert gate.select(groups, final=True).take == []
    gate.arrived(0)
    groups.append(finished(0, [version(0)]))
    assert gate.select(groups).take == []
    assert gate.select(groups, final=True).take == [0, 1]


def test_raising_max_lag_or_trading_slots_for_window_drops_nothing() -> None:
    """Tickets out under W = 1 and three slots must not be overtaken by the new, wider window."""
    play = Play(Gate(WindowPolicy(2, 1, window=1)))
    assert play.issue() == [0, 1, 2]
    play.gate.change(window=3)  # one slot
    play.finish(1, 2)
    assert play.step() == ([], [])
    assert play.issue() == []
    play.finish(0, versions=(version(0),))
    for expected in (0, 1, 2):
        assert play.step() == ([expected], [])
    assert play.issue() == [3]
    play.gate.change(max_lag=4)
    assert (play.gate.policy.window, play.gate.policy.slots) == (3, 3)


def test_lowering_max_lag_holds_from_the_next_batch() -> None:
    play = Play(Gate(WindowPolicy(2, 1, window=1)))
    play.issue()
    play.finish(0, 1, 2, versions=(version(0),))
    assert play.step() == ([0], [])
    play.gate.change(max_lag=0)
    assert play.step() == ([], [(1, DropReason.STALE), (2, DropReason.STALE)])
    assert play.issue() == [3]
    with pytest.raises(ConfigError):
        play.gate.change(window=2)
    assert play.gate.policy.max_lag == 0
