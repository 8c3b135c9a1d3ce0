"""Nothing that a model writes controls the terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.telemetry import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jgone", "\\e[2Jgone"),
        ("\x1b]0;title\x07", "\\e]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("good\rbad", "good\\rbad"),
        ("a\nb\tc", "a\\nb\\tc"),
        ("abc\u202edcb", "abc\\u202edcb"),
        ("line\u2028end", "line\\u2028end"),
        ("żółć 数学 ✓", "żółć 数学 ✓"),
    ],
)
def test_controls_become_visible(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_no_control_survives(text: str) -> None:
    assert not any(unicodedata.category(sign) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for sign in printable(text))


def test_long_text_is_cut_and_counted() -> None:
    assert printable("x" * 30, limit=10) == "x" * 10 + "... (20 more characters)"
