"""One row per optimizer step, strictly increasing; a status row and a summary however the run ends."""

import json
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.telemetry import JsonlSink, read_records
from headway.types import LearnerStatus, StepRecord, TimeSplit

SPLIT = TimeSplit(1.0, 0.5, 0.25, 0.25)


def record(step: int, skipped: bool = False) -> StepRecord:
    """A row whose numbers are zero but for the step."""
    empty = {int: 0, float: 0.0, bool: False, TimeSplit: SPLIT, list: [], dict: {}}
    kinds = {
        field.name: typing.get_origin(field.type) or field.type
        for field in msgspec.structs.fields(StepRecord)
    }
    values: dict[str, Any] = {name: empty[kind] for name, kind in kinds.items()}
    return StepRecord(**{**values, "step": step, "skipped": skipped})


def status(name: str, cause: str = "") -> LearnerStatus:
    return LearnerStatus(
        status=name, cause=cause, step=3, wall_s=2.0, samples_per_s=1.0, tokens_per_s=9.0, reward_last_10=0.5,
        max_lag_seen=1, lag_histogram=[5, 4], learner=SPLIT, generator=SPLIT, tickets={"issued": 3},
        trajectories={}, tokens={}, dropped={"stale": 1},
    )  # fmt: skip


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("name", "cause"), [("finished", ""), ("failed", "killed"), ("stopped", "Ctrl-C")])
def test_a_run_ends_with_a_status_row_and_a_summary(tmp_path: Path, name: str, cause: str) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", tmp_path / "summary.json")
    for step in (1, 2, 3):
        sink.step(record(step))
    sink.finish(status(name, cause))
    assert [(row["kind"], row["step"]) for row in rows(tmp_path / "metrics.jsonl")] == [
        ("step", 1), ("step", 2), ("step", 3), ("status", 3),
    ]  # fmt: skip
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["cause"], summary["updates"]) == (name, cause, 3)
    expected = {"wall_s", "samples_per_s", "tokens_per_s", "reward_last_10", "max_lag_seen", "lag_histogram"}
    assert expected <= set(summary)


def test_steps_never_repeat_not_even_across_a_resume(tmp_path: Path) -> None:
    paths = (tmp_path / "metrics.jsonl", tmp_path / "summary.json")
    first = JsonlSink(*paths)
    first.step(record(1))
    first.step(record(2))
    with pytest.raises(ValueError, match="step 2 after step 2"):
        first.step(record(2))
    first.close()
    second = JsonlSink(*paths)
    with pytest.raises(ValueError, match="step 1 after step 2"):
        second.step(record(1))
    second.step(record(3))
    second.close()
    assert [row.step for row in read_records(paths[0])] == [1, 2, 3]


def test_a_skipped_step_is_no_update(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", tmp_path / "summary.json")
    sink.step(record(1))
    sink.step(record(1, skipped=True))
    sink.step(record(2))
    sink.close()
    assert [row["kind"] for row in rows(tmp_path / "metrics.jsonl")] == ["step", "skipped", "step"]


def test_rows_read_back_equal_and_a_torn_row_harms_no_other(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", tmp_path / "summary.json")
    sink.step(record(1))
    sink.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "ste')
    assert read_records(tmp_path / "metrics.jsonl") == [record(1)]
    resumed = JsonlSink(tmp_path / "metrics.jsonl", tmp_path / "summary.json")
    resumed.step(record(2))
    resumed.close()
    assert read_records(tmp_path / "metrics.jsonl") == [record(1), record(2)]
