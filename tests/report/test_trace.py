"""The trace says of each process's time what the rows say."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from headway.report import RunReader, write_trace
from headway.report.trace import trace


def test_times_add_up_to_those_of_the_rows_and_no_slice_overlaps_another(
    make_run: Any, tmp_path: Path
) -> None:
    data = RunReader(make_run(12).path).read()
    write_trace(data, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    ends: dict[int, float] = defaultdict(float)
    for event in (event for event in events if event["ph"] == "X"):
        assert event["ts"] >= ends[event["pid"]] - 1e-3
        ends[event["pid"]] = event["ts"] + event["dur"]
        seconds[event["pid"], event["cat"]] += event["dur"] / 1e6
    for pid, split in ((1, data.status.learner), (2, data.status.generator)):
        for part in ("work", "push", "idle", "other"):
            assert seconds[pid, part] == pytest.approx(getattr(split, part))
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"learner", "generators (mean)"}


def test_counters_and_changes_lie_where_the_update_ended(make_run: Any) -> None:
    told = trace(RunReader(make_run(4).path).read())
    rewards = [event for event in told["traceEvents"] if event["ph"] == "C" and event["name"] == "reward"]
    assert [event["ts"] for event in rewards] == [2e6, 4e6, 6e6, 8e6]
    (change,) = [event for event in told["traceEvents"] if event["ph"] == "i"]
    assert change["name"] == "set staleness.max_lag"
    assert change["ts"] == 6e6


def test_a_run_without_rows_has_a_trace(make_run: Any) -> None:
    assert all(event["ph"] == "M" for event in trace(RunReader(make_run(0).path).read())["traceEvents"])
