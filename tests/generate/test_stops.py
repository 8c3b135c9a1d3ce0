"""The end of a stop string is found at the same token as by decoding everything, at a cost that does not grow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.generate.stops import ends_in_stop

# Bytes of each token: a character in three pieces, tokens without a text, several letters at once.
PIECES = [
    b"",
    b"a",
    b"b",
    b"ab",
    b"ba",
    b" a",
    b"\n",
    b"\n\n",
    "€".encode()[:1],
    "€".encode()[1:2],
    "€".encode()[2:],
    b"aaa",
]


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")


@given(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=60),
    st.lists(st.text("ab €\n", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_it_stops_where_decoding_everything_would(tokens: list[int], strings: list[str]) -> None:
    for count in range(1, len(tokens) + 1):
        expected = any(string in text_of(tokens[:count]) for string in strings)
        assert ends_in_stop(text_of, np.array(tokens[:count], np.int32), strings) == expected
        if expected:
            return


def test_a_token_late_in_a_sequence_costs_what_an_early_one_does() -> None:
    decoded: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return text_of(tokens)

    assert not ends_in_stop(decode, [1] * 10_000, ["b", "abba"])
    assert ends_in_stop(decode, [1] * 10_000 + [2], ["b", "abba"])
    assert max(decoded) < 20
    assert ends_in_stop(decode, [1, 2] + [0] * 500 + [1], ["ba"]), "behind tokens without a text"
