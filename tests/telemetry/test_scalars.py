"""Rows as flat numbers, against the JSON that metrics.jsonl holds."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from headway.telemetry import scalars

WORDS = {"step", "epoch", "skipped", "changes"}


def test_every_number_of_a_row_is_there_once(make_record: Any) -> None:
    record = make_record(5)
    expected: dict[str, float] = {}
    for name, value in json.loads(msgspec.json.encode(record)).items():
        if isinstance(value, dict):
            expected.update({f"{name}/{inner}": number for inner, number in value.items()})
        elif isinstance(value, list):
            expected.update({f"lag/{lag}": count for lag, count in enumerate(value)})
        elif name not in WORDS:
            expected[name] = value
    assert scalars(record) == expected
    assert expected["lag/1"] == 5
    assert expected["learner/idle"] == 5 / 3
