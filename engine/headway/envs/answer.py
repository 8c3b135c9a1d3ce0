"""The answer inside a completion's text, and whether it is the right one."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

from headway.errors import EnvironmentFailure

Extract = Literal["all", "first_line", "last_line", "first_number", "last_number", "after_marker"]
Match = Literal["exact", "number"]

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?|[-+]?\.\d+")


class AnswerReader:
    """Finds the answer in a text.

    Args:
        extract: "all": the whole text. "first_line", "last_line": that line; the last one that is not blank.
            "first_number", "last_number": that number, without thousands separators. "after_marker": what
            follows the last `marker`, up to the line's end. Blanks around an answer never count.
        marker: needed by "after_marker" and by nothing else.

    Raises:
        EnvironmentFailure: "after_marker" without a marker, or a marker without it.
    """

    def __init__(self, extract: Extract, marker: str | None = None) -> None:
        if (extract == "after_marker") != bool(marker):
            raise EnvironmentFailure(
                f"marker: got {marker!r} with extract = {extract!r}; only 'after_marker' takes one"
            )
        self._extract = extract
        self._marker = marker or ""

    def read(self, text: str) -> str | None:
        """The answer, or None if the text holds none."""
        if self._extract == "first_number":
            found = _NUMBER.search(text)
            return found.group().replace(",", "") if found else None
        if self._extract == "last_number":
            numbers = _NUMBER.findall(text)
            return numbers[-1].replace(",", "") if numbers else None
        return self._passage(text).strip() or None

    def _passage(self, text: str) -> str:
        match self._extract:
            case "first_line":
                return text.split("\n", 1)[0]
            case "last_line":
                return text.rstrip().rsplit("\n", 1)[-1]
            case "after_marker":
                return text.rpartition(self._marker)[2].split("\n", 1)[0] if self._marker in text else ""
            case _:
                return text


def matches(answer: str, expected: str, match: Match) -> bool:
    """Whether `answer` is `expected`: as the same text without blanks around it, or as the same number."""
    if match == "exact":
        return answer.strip() == expected.strip()
    left, right = as_number(answer), as_number(expected)
    return left is not None and left == right


def as_number(text: str) -> Decimal | None:
    """The finite number that `text` is, thousands separators allowed; None if it is none."""
    try:
        number = Decimal(text.replace(",", "").strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
