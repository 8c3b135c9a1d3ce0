"""docs/wire.md names every kind, field and reason as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

from headway.types import Trajectory
from headway.wire import DEFAULT_LIMITS, SCHEMA
from headway.wire.messages import DataMessage

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()


def test_every_kind_is_listed_with_its_fields() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| \w+, \w+ \| \w+ \| (.*) \|$", PAGE, re.MULTILINE))
    assert {kind: re.findall(r"`(\w+)`", fields) for kind, fields in rows.items()} == {
        kind.__name__: list(kind.__struct_fields__) for kind in DataMessage.__args__
    }


def test_the_fields_of_a_trajectory_are_listed_in_order() -> None:
    (paragraph,) = re.findall(r"^A trajectory: (.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    named = [name for name in re.findall(r"`(\w+)`", paragraph) if name in Trajectory.__struct_fields__]
    assert tuple(named) == Trajectory.__struct_fields__


def test_schema_and_limits_are_the_codecs() -> None:
    assert f"uint16 schema ({SCHEMA})" in PAGE
    head, frame = DEFAULT_LIMITS.max_head_bytes >> 20, DEFAULT_LIMITS.max_frame_bytes >> 20
    assert f"({head} MiB, {frame} MiB, {DEFAULT_LIMITS.max_items:,} items)" in PAGE
