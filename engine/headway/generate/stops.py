"""When a sequence ends by itself: stop ids by table, stop strings by decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.generate.batch import DecodeBatch
from headway.generate.plan import Ints
from headway.types import Sampling

_UNREADABLE = "\ufffd"  # what decoders put where bytes are no character
_MARGIN = 8  # characters: what decoding a suffix may get wrong at its beginning


def ends_in_stop(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int] | NDArray[np.int32], strings: Sequence[str]
) -> bool:
    """Whether one of `strings` is in the text of `tokens`, if none was before the last token.

    Only as much of the end is decoded as can hold one, so that the cost of a token does not grow with the sequence.
    What is found there, or is cut inside a character, is looked at once more in the whole text: decoders of byte
    tokens read a run of them as a whole, and give up all of it where one is wrong.

    Args:
        decode: ids to text; tokens: of the completion so far; strings: not empty.
    """
    needed = max(map(len, strings)) + _MARGIN
    num_tokens = needed
    while True:
        text = decode([int(token) for token in tokens[-num_tokens:]])
        is_whole = num_tokens >= len(tokens)
        found = any(string in text for string in strings)
        if is_whole or (len(text) >= needed and not found and _UNREADABLE not in text):
            return found
        num_tokens = len(tokens) if found or _UNREADABLE in text else 2 * num_tokens


class StopTable:
    """One row for each distinct set of stops; row 0 never stops.

    Args:
        vocab_size: V; decode: ids to text.
    """

    def __init__(self, vocab_size: int, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._rows: dict[tuple[tuple[int, ...], tuple[str, ...]], int] = {((), ()): 0}
        self._ids: NDArray[np.bool_] = np.zeros((1, vocab_size), np.bool_)
        self._strings: list[tuple[str, ...]] = [()]

    def row(self, sampling: Sampling) -> int:
        """The row of a request's stops."""
        if sampling.ignore_eos:
            return 0
        key = (tuple(sampling.stop_ids), tuple(sampling.stop_strings))
        if key not in self._rows:
            self._rows[key] = len(self._strings)
            table = np.zeros((1, self._ids.shape[1]), np.bool_)
            table[0, [token for token in sampling.stop_ids if 0 <= token < self._ids.shape[1]]] = True
            self._ids = np.concatenate([self._ids, table])
            self._strings.append(key[1])
        return self._rows[key]

    def stopped(self, batch: DecodeBatch, rows: Ints, last: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of `rows` [S] have just sampled, as `last` [S], a stop id or the end of a stop string.

        A row whose `last` is negative has sampled nothing, so it has not stopped.
        """
        sampled = last >= 0
        stopped = sampled & self._ids[batch.stop_row[rows], np.maximum(last, 0)]
        if any(self._strings):
            for index in np.flatnonzero(sampled & ~stopped).tolist():
                strings = self._strings[int(batch.stop_row[rows[index]])]
                if strings:
                    tokens = batch.tokens[rows[index], : batch.count[rows[index]]]
                    stopped[index] = ends_in_stop(self._decode, tokens, strings)
        return stopped
