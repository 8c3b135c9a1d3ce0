"""The ledger against an independent tally: a table with one line per ticket, trajectory and token count."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headway.staleness import Ledger
from headway.types import DropReason

GENERATORS = ["a", "b", "c"]
TOKENS = st.integers(0, 50)


class LedgerMachine(RuleBasedStateMachine):
    """Random lives of tickets. `fates` has one (kind, outcome, number) line per ending thing."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.tickets: list[dict[str, object]] = []
        self.fates: Counter[tuple[str, str]] = Counter()
        self.received = Counter({"trajectories": 0, "tokens": 0})

    def some(self, data: st.DataObject, buffered: bool | None = None) -> int:
        ids = [i for i, t in enumerate(self.tickets) if t["open"] and buffered in (None, t["buffered"])]
        return data.draw(st.sampled_from(ids))

    def any_open(self, buffered: bool | None = None) -> bool:
        return any(t["open"] and buffered in (None, t["buffered"]) for t in self.tickets)

    def held(self, ticket_id: int) -> list[int]:
        held = self.tickets[ticket_id]["held"]
        assert isinstance(held, list)
        return held

    def close(self, ticket_id: int, outcome: str) -> None:
        self.tickets[ticket_id]["open"] = False
        self.fates["tickets", outcome] += 1
        self.fates["trajectories", outcome] += len(self.held(ticket_id))
        self.fates["tokens", outcome] += sum(self.held(ticket_id))

    @rule(generator=st.sampled_from(GENERATORS))
    def issue(self, generator: str) -> None:
        self.ledger.issue(len(self.tickets), generator)
        self.tickets.append({"open": True, "buffered": False, "held": [], "generator": generator})

    @precondition(lambda self: self.any_open(buffered=False))
    @rule(data=st.data(), num_tokens=TOKENS)
    def receive(self, data: st.DataObject, num_tokens: int) -> None:
        ticket_id = self.some(data, buffered=False)
        assert self.ledger.refusal(ticket_id, str(self.tickets[ticket_id]["generator"])) is None
        self.ledger.receive(ticket_id, num_tokens)
        self.held(ticket_id).append(num_tokens)
        self.received.update(trajectories=1, tokens=num_tokens)

    @rule(reason=st.sampled_from([DropReason.DUPLICATE, DropReason.TICKET_CLOSED]), num_tokens=TOKENS)
    def refuse(self, reason: DropReason, num_tokens: int) -> None:
        self.ledger.refuse(reason, "a", num_tokens)
        self.received.update(trajectories=1, tokens=num_tokens)
        self.fates["trajectories", reason] += 1
        self.fates["tokens", reason] += num_tokens

    @rule(num_tokens=TOKENS)
    def fail(self, num_tokens: int) -> None:
        self.ledger.fail(DropReason.GENERATION_FAILED, "b", num_tokens)
        self.received.update(tokens=num_tokens)
        self.fates["tokens", DropReason.GENERATION_FAILED] += num_tokens

    @precondition(lambda self: self.any_open())
    @rule(data=st.data())
    def drop_one_member(self, data: st.DataObject) -> None:
        ticket_id = self.some(data)
        if self.held(ticket_id):
            num_tokens = self.held(ticket_id).pop()
            self.ledger.drop_trajectory(ticket_id, DropReason.REWARD_FAILED, num_tokens)
            self.fates["trajectories", DropReason.REWARD_FAILED] += 1
            self.fates["tokens", DropReason.REWARD_FAILED] += num_tokens

    @precondition(lambda self: self.any_open(buffered=False))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket_id = self.some(data, buffered=False)
        self.ledger.buffer(ticket_id)
        self.tickets[ticket_id]["buffered"] = True

    @precondition(lambda self: self.any_open(buffered=True))
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        ticket_id = self.some(data, buffered=True)
        held = self.held(ticket_id)
        masked = data.draw(st.integers(0, len(held)))
        extra = data.draw(st.integers(0, sum(held[masked:])))
        masked_tokens = sum(held[:masked]) + extra
        self.ledger.train(ticket_id, masked, masked_tokens)
        self.close(ticket_id, "trained")
        self.fates["trajectories", "trained"] -= masked
        self.fates["trajectories", "masked"] += masked
        self.fates["tokens", "trained"] -= masked_tokens
        self.fates["tokens", "masked"] += masked_tokens

    @precondition(lambda self: self.any_open())
    @rule(data=st.data(), reason=st.sampled_from([DropReason.STALE, DropReason.DEADLINE]))
    def drop(self, data: st.DataObject, reason: DropReason) -> None:
        ticket_id = self.some(data)
        self.ledger.drop(ticket_id, reason)
        self.close(ticket_id, reason)

    @rule()
    def restore_from_its_state(self) -> None:
        self.ledger = Ledger(self.ledger.state())

    @invariant()
    def balances_and_equals_the_table(self) -> None:
        self.ledger.check()
        counts = self.ledger.counts()
        open_ids = [i for i, t in enumerate(self.tickets) if t["open"]]
        buffered = sum(bool(self.tickets[i]["buffered"]) for i in open_ids)
        held = {
            "trajectories": sum(len(self.held(i)) for i in open_ids),
            "tokens": sum(sum(self.held(i)) for i in open_ids),
        }
        assert counts.tickets["issued"] == len(self.tickets)
        assert (counts.tickets["buffered"], counts.tickets["in_flight"]) == (
            buffered,
            len(open_ids) - buffered,
        )
        for kind, got in (("trajectories", counts.trajectories), ("tokens", counts.tokens)):
            assert got["received"] == self.received[kind]
            assert got["buffered"] == held[kind]
            assert got["received"] == got["trained"] + got["masked"] + got["dropped"] + got["buffered"]
        for (kind, outcome), num in self.fates.items():
            got = getattr(counts, kind)
            assert got.get(outcome if outcome in ("trained", "masked") else f"dropped.{outcome}", 0) == num
        assert counts.dropped == {
            outcome: num
            for (kind, outcome), num in self.fates.items()
            if kind == "tickets" and outcome != "trained"
        }
        frontier = min(open_ids, default=len(self.tickets))
        assert self.ledger.frontier == frontier
        ended = [i for i, t in enumerate(self.tickets) if not t["open"]]
        assert [*range(frontier), *self.ledger.ended_beyond_frontier()] == ended


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_every_thing_ends_once_and_is_counted_once = LedgerMachine.TestCase


def ledger_with(*states: str) -> Ledger:
    """One ticket per word: open | buffered | trained | dropped."""
    ledger = Ledger()
    for ticket_id, state in enumerate(states):
        ledger.issue(ticket_id, "a")
        ledger.receive(ticket_id, 10)
        if state in ("buffered", "trained"):
            ledger.buffer(ticket_id)
        if state == "trained":
            ledger.train(ticket_id)
        if state == "dropped":
            ledger.drop(ticket_id, DropReason.DEADLINE)
    return ledger


@pytest.mark.parametrize("ended", ["trained", "dropped"])
def test_a_ticket_ends_once(ended: str) -> None:
    ledger = ledger_with(ended)
    for again in (
        lambda: ledger.train(0),
        lambda: ledger.drop(0, DropReason.STALE),
        lambda: ledger.buffer(0),
        lambda: ledger.receive(0, 1),
    ):
        with pytest.raises(AssertionError, match="ticket 0 is not open"):
            again()
    ledger.check()


def test_wrong_orders_are_refused() -> None:
    ledger = ledger_with("open", "buffered")
    with pytest.raises(AssertionError, match="next admission index is 2"):
        ledger.issue(3, "a")
    with pytest.raises(AssertionError, match="finished twice"):
        ledger.buffer(1)
    with pytest.raises(AssertionError, match="before it was finished"):
        ledger.train(0)
    with pytest.raises(AssertionError, match="more ended than was received"):
        ledger_with("open").drop_trajectory(0, DropReason.INVALID, 11)
    with pytest.raises(AssertionError, match="cannot end as trained"):
        ledger_with("buffered").train(0, masked_trajectories=2)


def test_a_balance_that_is_off_raises_with_the_counts() -> None:
    ledger = ledger_with("open")
    state = ledger.state()
    state.tokens.opened += 1
    with pytest.raises(AssertionError, match=r"tokens.*\(11, 10\)"):
        Ledger(state).check()
    ledger.check()  # the state is detached


def test_refusals_name_the_reason() -> None:
    ledger = ledger_with("open", "buffered", "trained", "dropped")
    answers = [ledger.refusal(ticket_id, "a") for ticket_id in range(-1, 5)]
    unknown, closed = DropReason.UNKNOWN_TICKET, DropReason.TICKET_CLOSED
    assert answers == [unknown, None, closed, closed, closed, unknown]
    assert ledger.refusal(0, "stranger") is unknown


def test_tokens_that_die_unsent_are_counted_from_the_last_report() -> None:
    """generated = received + lost_unsent, for a generator that sent 10 and 7 of the 40 tokens it reported."""
    ledger = ledger_with("open")  # 10 tokens received from "a"
    ledger.report("a", 25)
    ledger.fail(DropReason.GENERATION_FAILED, "a", 7)
    ledger.report("a", 40)
    ledger.report("a", 30)  # an older report, overtaken
    assert ledger.counts().tokens["lost_unsent"] == 0
    assert ledger.lose("a") == 23
    assert Ledger(ledger.state()).counts().tokens["lost_unsent"] == 23
    ledger.refuse(DropReason.TICKET_CLOSED, "a", 20)  # it was only frozen, and some arrive after all
    assert ledger.counts().tokens["lost_unsent"] == 3
    ledger.refuse(DropReason.DUPLICATE, "a", 20)  # sent again: not generated again
    assert ledger.counts().tokens["lost_unsent"] == 3
    ledger.report("a", 40)
    assert ledger.counts().tokens["lost_unsent"] == 0
    assert ledger.lose("never seen") == 0


def test_memory_is_that_of_the_open_tickets() -> None:
    ledger = Ledger()
    for ticket_id in range(10_000):
        ledger.issue(ticket_id, "a")
        ledger.receive(ticket_id, 3)
        ledger.buffer(ticket_id)
        if ticket_id >= 8:
            ledger.train(ticket_id - 8)
        ledger.refuse(DropReason.UNKNOWN_TICKET, f"stranger {ticket_id}", 1)
    state = ledger.state()
    assert len(state.open_tickets) == 8
    assert list(state.generators) == ["a"]
    assert ledger.counts().tokens["received"] == 40_000
