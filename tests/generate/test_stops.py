"""The end of a stop string is found at the same token as by decoding everything, at a cost that does not grow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

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
    assert max(decoded) < 20
    assert ends_in_stop(decode, [1] * 10_000 + [2], ["b", "abba"])
    assert ends_in_stop(decode, [1, 2] + [0] * 500 + [1], ["ba"]), "behind tokens without a text"


LLAMA = decoders.Sequence([
    decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
])  # fmt: skip
LLAMA_PIECES = ["a", "▁b", "ab", "\n", *(f"<0x{byte:02X}>" for byte in b"\n\xe2\x82\xaca")]


def llama_text(tokens: Sequence[int]) -> str:
    """As SentencePiece models with byte tokens decode: a run of bytes that is no text is lost as a whole."""
    return LLAMA.decode([LLAMA_PIECES[token] for token in tokens])


@given(
    st.lists(st.integers(0, len(LLAMA_PIECES) - 1), min_size=1, max_size=60),
    st.lists(st.text("ab €\n", min_size=1, max_size=4), min_size=1, max_size=2),
)
def test_it_stops_there_with_byte_tokens_too(tokens: list[int], strings: list[str]) -> None:
    for count in range(1, len(tokens) + 1):
        expected = any(string in llama_text(tokens[:count]) for string in strings)
        assert ends_in_stop(llama_text, tokens[:count], strings) == expected
        if expected:
            return


@pytest.mark.parametrize(
    ("text", "stop"), [("€€€€€\n", "\n"), ("ไทยภาษา\n", "\n"), ("中中中中中中\n\n", "\n\n")]
)
def test_a_stop_behind_characters_of_several_tokens_is_found(text: str, stop: str) -> None:
    data = text.encode()
    decode = lambda tokens: LLAMA.decode([f"<0x{token:02X}>" for token in tokens])  # noqa: E731
    assert ends_in_stop(decode, list(data), [stop])
    assert not ends_in_stop(decode, list(data[:-1]), [stop])
