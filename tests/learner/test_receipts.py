"""A message that a generator sends again is taken in once, whatever the order, the reconnects and the resumes."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headway.learner.receipts import MAX_AHEAD, MAX_INCARNATIONS, Receipts, ReceiptState


@given(
    st.integers(1, 30).flatmap(lambda n: st.lists(st.integers(1, n), max_size=80)),
    st.sets(st.integers(0, 79)),
)
def test_each_sequence_number_is_new_once_over_any_resume(numbers: list[int], resumes: set[int]) -> None:
    receipts = Receipts()
    new: list[int] = []
    for index, number in enumerate(numbers):
        if index in resumes:
            stored = msgspec.msgpack.encode(receipts.state())
            receipts = Receipts()
            receipts.restore(msgspec.msgpack.decode(stored, type=ReceiptState))
        if receipts.is_new(number, "g0"):
            new.append(number)
    assert new == list(dict.fromkeys(numbers))


def test_a_message_that_overtakes_does_not_hide_the_older_ones() -> None:
    receipts = Receipts()
    assert [receipts.is_new(seq, "g") for seq in (1, 4, 2, 3, 4, 5)] == [True, True, True, True, False, True]
    assert (receipts.state()["g"].through, receipts.state()["g"].beyond) == (5, set())


def test_incarnations_do_not_share_their_numbers_and_do_not_pile_up() -> None:
    receipts = Receipts()
    assert receipts.is_new(1, "a")
    assert receipts.is_new(1, "b")
    for index in range(3 * MAX_INCARNATIONS):
        receipts.is_new(1, f"g{index}")
        assert not receipts.is_new(1, "a")  # heard all the time, so never forgotten
    assert len(receipts.state()) == MAX_INCARNATIONS


def test_numbers_that_no_orderly_peer_can_have_come_to_are_not_accepted() -> None:
    receipts = Receipts()
    assert [receipts.accepts(seq, "g") for seq in (0, -1, 1, MAX_AHEAD, MAX_AHEAD + 1)] == [
        False, False, True, True, False,
    ]  # fmt: skip
