"""A message that a generator sends again is taken in once, whatever the order in which it comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.learner.peers import Peer


@given(st.integers(1, 30).flatmap(lambda n: st.lists(st.integers(1, n), max_size=80)))
def test_each_sequence_number_is_new_once(numbers: list[int]) -> None:
    peer = Peer(b"g0", "g0", 0, 1, None)
    assert [number for number in numbers if peer.is_new(number)] == list(dict.fromkeys(numbers))


def test_a_message_that_overtakes_does_not_hide_the_older_ones() -> None:
    peer = Peer(b"g0", "g0", 0, 1, None)
    assert [peer.is_new(seq) for seq in (1, 4, 2, 3, 4, 5)] == [True, True, True, True, False, True]
    assert (peer.last_seq, peer.ahead) == (5, set())
