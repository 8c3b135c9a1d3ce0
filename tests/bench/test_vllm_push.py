"""Verdicts of the vLLM push bench; its run needs vLLM (`headway bench vllm`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway_bench.vllm_push import Measured, Options, missed_bars, rows_of

OPTIONS = Options(3, 8, "keep", "builtin:sort5", Path("unused"))


def measured(extra_ms: list[float]) -> Measured:
    return Measured(extra_ms, [2 * value for value in extra_ms], [0.1] * 3, [3.0] * 6)


def test_bars_are_judged_on_the_median_of_ratios_within_a_round() -> None:
    found = {"headway": measured([2.0, 4.0, 10.0]), "vllm update": measured([12.0, 16.0, 20.0])}
    rows = rows_of(found, OPTIONS)
    by_case = {row.case: row for row in rows}
    assert by_case["extra gap/vllm update"].ratios["over headway"].p50 == 4.0  # of 6, 4 and 2
    assert missed_bars(rows) == []
    slower = rows_of({**found, "headway": measured([4.0, 8.0, 10.0])}, OPTIONS)
    assert missed_bars(slower) == [
        "extra gap/vllm update: 2.00 (2.00 to 2.60) of headway's, at least 3"
    ]  # 3, 2 and 2


def test_a_gap_within_the_noise_counts_as_the_floor_and_a_long_one_misses_its_bar() -> None:
    rows = rows_of({"headway": measured([-0.5] * 3), "vllm update": measured([1.0] * 3)}, OPTIONS)
    assert {row.case: row for row in rows}["extra gap/vllm update"].ratios[
        "over headway"
    ].p50 == pytest.approx(10)
    long = rows_of({"headway": measured([21.0] * 3), "vllm update": measured([90.0] * 3)}, OPTIONS)
    assert missed_bars(long) == ["extra gap/headway: 21.0 ms, at most 20"]
