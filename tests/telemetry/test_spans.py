"""Slices of time cover a process's life without gaps, and their parts are those of its clock, to the nanosecond."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.telemetry import Header, SpanLog, SplitClock
from headway.telemetry import spans as spans_module

HEADER = Header("generator 0", "generator", 7, "here", 1.7e9)
MS = 1_000_000


class FakeTime:
    """A clock that is moved by hand; it does not start at 0."""

    def __init__(self) -> None:
        self.now = 12_345

    def __call__(self) -> int:
        return self.now


def recorded(path: Path, states: list[tuple[str, int]]) -> tuple[list[list[int]], SplitClock]:
    """The slices of a process that was in these states for so many nanoseconds."""
    time = FakeTime()
    clock = SplitClock(time, lambda begin: SpanLog(path, HEADER, begin))
    tokens = [0]
    clock.sampled_by(lambda: tokens[0])
    for state, lasts in states:
        with clock(state):  # type: ignore[arg-type]
            time.now += lasts
            tokens[0] += state == "work"
    clock.close()
    header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert header == {
        "process": "generator 0",
        "side": "generator",
        "pid": 7,
        "host": "here",
        "unix_s": 1.7e9,
    }
    return lines, clock


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["work", "push", "idle", "other"]),
            st.sampled_from([0, 1, MS // 3, 3 * MS, 700 * MS]),
        ),
        max_size=80,
    )
)
def test_slices_have_no_gaps_and_their_parts_are_the_clocks(
    tmp_path_factory: pytest.TempPathFactory, states: list[tuple[str, int]]
) -> None:
    rows, clock = recorded(tmp_path_factory.mktemp("spans") / "p.jsonl", states)
    total, split = sum(lasts for _, lasts in states), clock.split()
    assert [row[0] for row in rows] == [0, *(row[1] for row in rows)][: len(rows)]
    assert (rows[-1][1] if rows else 0) == total
    assert all(sum(row[2:6]) == row[1] - row[0] > 0 for row in rows)
    for column, part in enumerate(("work", "push", "idle", "other"), 2):
        assert sum(row[column] for row in rows) / 1e9 == pytest.approx(getattr(split, part), abs=1e-9)
    assert sum(row[6] for row in rows) <= sum(state == "work" for state, _ in states)


def test_long_states_have_slices_of_their_own(tmp_path: Path) -> None:
    rows, _ = recorded(
        tmp_path / "p.jsonl", [("idle", 5 * MS), ("work", 7 * MS), ("push", 3 * MS), ("work", 9 * MS)]
    )
    assert [row[2:6].index(max(row[2:6])) for row in rows] == [2, 0, 1, 0]
    assert [row[1] - row[0] for row in rows] == [5 * MS, 7 * MS, 3 * MS, 9 * MS]
    assert [row[6:] for row in rows] == [[0, 0], [1, 1], [0, 0], [1, 1]]


def test_short_states_share_slices_of_half_a_second(tmp_path: Path) -> None:
    """A thousand decode steps of a millisecond, a tenth of one between them."""
    rows, _ = recorded(tmp_path / "p.jsonl", [("work", MS), ("other", MS // 10)] * 1000)
    assert len(rows) == 3
    assert [row[6] for row in rows] == [455, 455, 90]
    assert sum(row[7] for row in rows) == 1000


def test_a_long_run_becomes_coarser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "COARSER", 50)
    rows, _ = recorded(tmp_path / "p.jsonl", [("work", 3 * MS), ("idle", 3 * MS)] * 4000)
    assert len(rows) < 400  # of 8,000


def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    time = FakeTime()
    with caplog.at_level(logging.WARNING):
        clock = SplitClock(time, lambda begin: SpanLog(blocked / "p.jsonl", HEADER, begin))
    for _ in range(3):
        with clock("work"):
            time.now += MS
    clock.close()
    assert clock.split().work == pytest.approx(3e-3)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "the timeline of this process is not recorded any more"
    ]
    full = SplitClock(time, lambda begin: SpanLog(Path("/dev/full"), HEADER, begin))
    full.close()
    assert "No space left" in caplog.text


def test_a_second_process_goes_on_with_the_file(tmp_path: Path) -> None:
    for _ in range(2):
        SpanLog(tmp_path / "p.jsonl", HEADER, 0).close()
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 2


def test_other_threads_that_look_at_the_clock_cut_no_slice(tmp_path: Path) -> None:
    time = FakeTime()
    clock = SplitClock(time, lambda begin: SpanLog(tmp_path / "p.jsonl", HEADER, begin))
    with clock("idle"):
        time.now += 5 * MS
        clock.split()  # as a heartbeat does
        time.now += 5 * MS
    clock.close()
    assert json.loads((tmp_path / "p.jsonl").read_text().splitlines()[1]) == [
        0,
        10 * MS,
        0,
        0,
        10 * MS,
        0,
        0,
        0,
    ]
