"""A sink that fails, blocks or never ends does not stop the run; what it lacks is counted and said once."""

from __future__ import annotations

import threading
from typing import Any

from headway.telemetry import MemorySink
from headway.telemetry.detached import Detached
from headway.types import LearnerStatus, StepRecord


class Failing(MemorySink):
    """Raises on the rows of `bad`."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.bad = bad

    def step(self, record: StepRecord) -> None:
        if record.step in self.bad:
            raise OSError(f"disk full \x1b[2J at {record.step}")
        super().step(record)


class Blocking(MemorySink):
    """Does not take a row until `go` is set; says when it holds the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.held = threading.Event(), threading.Event()

    def step(self, record: StepRecord) -> None:
        self.held.set()
        assert self.go.wait(30)
        super().step(record)


def test_rows_arrive_in_order_and_the_end_is_waited_for(make_record: Any, finished: LearnerStatus) -> None:
    inner, said = MemorySink(), list[str]()
    sink = Detached("board", inner, said.append)
    records = [make_record(step) for step in range(1, 50)]
    for record in records:
        sink.step(record)
    sink.finish(finished)
    assert inner.records == records
    assert inner.status == finished
    assert said == []


def test_a_failure_is_said_once_and_the_lost_rows_are_counted(
    make_record: Any, finished: LearnerStatus
) -> None:
    inner, said = Failing({2, 4, 5}), list[str]()
    sink = Detached("board", inner, said.append)
    for step in range(1, 7):
        sink.step(make_record(step))
    sink.finish(finished)
    assert [record.step for record in inner.records] == [1, 3, 6]
    assert sink.num_lost == 3
    first, last = said
    assert "board fails, the run goes on" in first
    assert "disk full \\e[2J at 2" in first
    assert last == "telemetry: board lacks 3 of 6 rows; metrics.jsonl has all"


def test_a_sink_that_blocks_costs_rows_and_no_time(make_record: Any, finished: LearnerStatus) -> None:
    inner, said = Blocking(), list[str]()
    sink = Detached("board", inner, said.append, queued=2, finish_s=30.0)
    sink.step(make_record(1))
    assert inner.held.wait(30)
    for step in range(2, 10):  # two of them find room
        sink.step(make_record(step))
    assert sink.num_lost == 6
    assert said == ["telemetry: board fails, the run goes on without what it loses: it is 2 rows behind"]
    inner.go.set()
    sink.finish(finished)
    assert [record.step for record in inner.records] == [1, 2, 3]
    assert said[1:] == ["telemetry: board lacks 6 of 9 rows; metrics.jsonl has all"]


def test_a_sink_that_never_ends_is_left_behind(make_record: Any, finished: LearnerStatus) -> None:
    inner, said = Blocking(), list[str]()
    sink = Detached("board", inner, said.append, finish_s=0.05)
    sink.step(make_record(1))
    sink.finish(finished)
    inner.go.set()
    assert any("board did not end within 0.05 s" in line for line in said)


def test_a_sink_whose_end_fails_is_said(make_record: Any, finished: LearnerStatus) -> None:
    class BadEnd(MemorySink):
        def finish(self, status: LearnerStatus) -> None:
            raise RuntimeError("no network")

    said = list[str]()
    sink = Detached("board", BadEnd(), said.append)
    sink.step(make_record(1))
    sink.finish(finished)
    assert said == ["telemetry: board fails, the run goes on without what it loses: RuntimeError: no network"]
