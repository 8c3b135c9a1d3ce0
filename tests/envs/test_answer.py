"""Answers in texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.envs.answer import AnswerReader, Extract, Match, matches


@pytest.mark.parametrize(
    ("extract", "text", "answer"),
    [
        ("all", "  12 \n", "12"),
        ("all", " \n ", None),
        ("first_line", " 12\n13", "12"),
        ("first_line", "\n13", None),
        ("last_line", "so\nit is 12\n\n", "it is 12"),
        ("last_line", "", None),
        ("first_number", "it is -1,234.50, not 7.", "-1234.50"),
        ("first_number", "3-2", "3"),
        ("first_number", "none", None),
        ("last_number", "12 + 7 = 19.", "19"),
        ("last_number", "is .5", ".5"),
        ("after_marker", "#### 1\n#### 42 \nthe end", "42"),
        ("after_marker", "42", None),
    ],
)
def test_extraction(extract: Extract, text: str, answer: str | None) -> None:
    reader = AnswerReader(extract, "####" if extract == "after_marker" else None)
    assert reader.read(text) == answer


@given(st.integers())
def test_numbers_are_found_in_a_sentence(number: int) -> None:
    assert AnswerReader("first_number").read(f"The answer is {number:,}!") == str(number)
    assert AnswerReader("last_number").read(f"Not 5 but {number}.") == str(number)


@pytest.mark.parametrize(
    ("answer", "expected", "match", "equal"),
    [
        ("1000", "1,000.0", "number", True),
        ("+7", "007", "number", True),
        ("0.1", "0.10", "number", True),
        ("seven", "7", "number", False),
        ("nan", "nan", "number", False),
        ("", "0", "number", False),
        ("7.0", "7", "exact", False),
        (" 7", "7 ", "exact", True),
        ("Paris", "paris", "exact", False),
    ],
)
def test_matching(answer: str, expected: str, match: Match, equal: bool) -> None:
    assert matches(answer, expected, match) is equal
