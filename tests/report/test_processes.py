"""The timeline holds what the processes wrote: every slice, summed where many, nothing across a process's death."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.report import RunReader, document
from headway.report.processes import MAX_PROCESSES, Process, ProcessReader
from headway.report.recorded import MAX_SLICES, timeline
from headway.report.trace import trace

S = 1_000_000_000


def header(process: str, unix_s: float, side: str = "generator") -> str:
    return json.dumps({"process": process, "side": side, "pid": 1, "host": "here", "unix_s": unix_s})


def write(path: Path, *lines: str, torn: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(line + "\n" for line in lines) + torn)


def one_slice(begin: int, work: int, idle: int) -> str:
    """Seconds `begin` to `begin + work + idle`."""
    return json.dumps([begin * S, (begin + work + idle) * S, work * S, 0, idle * S, 0, 1, 5])


def test_lives_of_one_name_follow_each_other_and_the_learner_comes_first(tmp_path: Path) -> None:
    write(tmp_path / "g10-a.jsonl", header("generator 10", 100.0), one_slice(0, 2, 1))
    write(tmp_path / "g2-b.jsonl", header("generator 2", 150.0), one_slice(0, 1, 1), one_slice(2, 3, 0))
    write(tmp_path / "g2-a.jsonl", header("generator 2", 100.0), one_slice(0, 4, 1))
    write(tmp_path / "learner-0.jsonl", header("learner", 99.0, "learner"), one_slice(0, 0, 7))
    read = ProcessReader(tmp_path).read()
    assert [process.name for process in read] == ["learner", "generator 2", "generator 10"]
    assert read[1].slices.tolist() == [
        [100.0, 105.0, 4.0, 0.0, 1.0, 0.0], [150.0, 152.0, 1.0, 0.0, 1.0, 0.0], [152.0, 155.0, 3.0, 0.0, 0.0, 0.0],
    ]  # fmt: skip
    assert read[1].counts.tolist() == [[1.0, 5.0]] * 3


def test_a_later_read_takes_what_is_new_and_what_was_torn_is_left_for_it(tmp_path: Path) -> None:
    path = tmp_path / "g0-a.jsonl"
    reader = ProcessReader(tmp_path)
    assert reader.read() == []
    line = one_slice(1, 1, 0)
    write(path, header("generator 0", 10.0), one_slice(0, 1, 0), torn=line[:9])
    assert len(reader.read()[0].slices) == 1
    write(path, line[9:], "not JSON", "[1, 2]", "{}", one_slice(2, 1, 0))
    assert reader.read()[0].slices[:, 0].tolist() == [10.0, 11.0, 12.0]


def test_a_header_behind_a_torn_slice_begins_a_life(tmp_path: Path) -> None:
    path = tmp_path / "learner-0.jsonl"
    write(path, header("learner", 10.0, "learner"), one_slice(0, 1, 0), torn=one_slice(1, 1, 0)[:9])
    write(path, header("learner", 50.0, "learner"), one_slice(0, 2, 0))
    assert ProcessReader(tmp_path).read()[0].slices[:, 0].tolist() == [10.0, 50.0]


def test_a_name_is_drawn_letter_by_letter(tmp_path: Path) -> None:
    write(tmp_path / "g0.jsonl", header("<a href='x'>\x1b[2J", 10.0), one_slice(0, 1, 0))
    (drawn,) = timeline(ProcessReader(tmp_path).read())
    lanes = {name for trace in drawn["traces"] for name in trace["y"]}
    assert not any("<" in name or "\x1b" in name for name in lanes)
    assert len(lanes) == 1


def test_neighbours_are_summed_but_never_across_a_gap() -> None:
    begins = np.array([0.0, 1.0, 2.0, 3.0, 10.0, 11.0])
    parts = np.arange(24, dtype=float).reshape(6, 4)
    process = Process("p", "generator", np.column_stack((begins, begins + 1.0, parts)))
    coarse = process.coarse(2)
    assert coarse[:, :2].tolist() == [[0.0, 3.0], [3.0, 4.0], [10.0, 12.0]]
    assert coarse[:, 2:].sum(axis=0).tolist() == parts.sum(axis=0).tolist()
    assert process.coarse(6) is process.slices


def test_the_timeline_draws_all_the_time_of_each_process(make_run: Any) -> None:
    folder = make_run(4)
    rows = [one_slice(2 * at, 1, 1) for at in range(3 * MAX_SLICES)]
    write(folder.spans / "learner-0.jsonl", header("learner", 1.7e9, "learner"), *rows)
    write(folder.spans / "g0-a.jsonl", header("generator 0", 1.7e9 + 5), one_slice(0, 3, 0))
    (figure,) = [
        each for each in document(RunReader(folder.path).read())["figures"] if each["id"] == "timeline"
    ]
    drawn = {trace["name"]: trace for trace in figure["traces"]}
    seconds = {
        (name, lane): sum(x for x, y in zip(trace["x"], trace["y"], strict=True) if y == lane)
        for name, trace in drawn.items()
        for lane in ("learner", "generator 0")
    }
    total = 3.0 * MAX_SLICES
    assert seconds["work", "learner"] == pytest.approx(total)
    assert seconds["idle", "learner"] == pytest.approx(total)
    assert (seconds["work", "generator 0"], seconds["idle", "generator 0"]) == (3.0, 0)
    assert drawn["work"]["base"][drawn["work"]["y"].index("generator 0")] == pytest.approx(5.0)
    assert sum(len(trace["x"]) for trace in drawn.values()) <= 4 * MAX_SLICES


def test_the_trace_has_a_track_for_each_process(make_run: Any) -> None:
    folder = make_run(3)
    write(folder.spans / "learner-0.jsonl", header("learner", 1.7e9 - 9.0, "learner"), one_slice(0, 2, 1))
    write(folder.spans / "g0-a.jsonl", header("generator 0", 1.7e9), one_slice(0, 3, 0))
    events = trace(RunReader(folder.path).read())["traceEvents"]
    tracks = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    slices = [
        (tracks[event["pid"]], event["name"], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in events
        if event["ph"] == "X"
    ]
    assert slices == [
        ("learner", "idle", 0, 1),
        ("learner", "train", 1, 2),
        ("generator 0", "generate", 9, 3),
    ]
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"reward", "ess"}


def test_of_very_many_processes_the_first_are_shown_and_that_is_said(tmp_path: Path) -> None:
    for index in range(MAX_PROCESSES + 3):
        write(tmp_path / f"g{index}-a.jsonl", header(f"generator {index}", 1.0), one_slice(0, 1, 0))
    read = ProcessReader(tmp_path).read()
    assert [process.name for process in read] == [f"generator {index}" for index in range(MAX_PROCESSES)]
    assert "The first 32 processes are shown." in timeline(read)[0]["note"]
