"""Reading a run while it is written, cut short and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.report import RunReader


def test_a_later_read_takes_in_what_was_written_since(make_run: Any) -> None:
    folder = make_run(6)
    whole = folder.metrics.read_bytes()
    cut = whole.index(b'{"kind":"step","step":4') + 30
    folder.metrics.write_bytes(whole[:cut])
    reader = RunReader(folder.path)
    first = reader.read()
    assert [row["step"] for row in first.steps] == [1, 2, 3]
    assert first.status.status == "running"
    assert first.status.step == 3
    assert not first.ended
    with folder.metrics.open("ab") as file:
        file.write(whole[cut:])
    second = reader.read()
    assert [row["step"] for row in second.steps] == [1, 2, 3, 4, 5, 6]
    assert second.ended
    assert second.status == RunReader(folder.path).read().status
    assert [row["step"] for row in first.steps] == [1, 2, 3]


def test_a_file_that_a_resume_replaced_is_read_anew(make_run: Any) -> None:
    folder = make_run(6)
    reader = RunReader(folder.path)
    assert len(reader.read().steps) == 6
    rows = folder.metrics.read_bytes().splitlines(keepends=True)
    fresh = folder.metrics.with_name("fresh")
    fresh.write_bytes(b"".join(rows[:2]))
    fresh.replace(folder.metrics)
    data = reader.read()
    assert [row["step"] for row in data.steps] == [1, 2]
    assert not data.ended
    assert data.status.step == 2


def test_a_run_that_goes_on_after_its_status_row_is_running(make_run: Any) -> None:
    folder = make_run(3)
    rows = folder.metrics.read_bytes().splitlines(keepends=True)
    folder.metrics.write_bytes(b"".join([*rows[:2], rows[3], rows[2]]))
    assert not RunReader(folder.path).read().ended


def test_rows_with_a_gradient_that_was_not_finite_are_kept_apart(make_run: Any) -> None:
    folder = make_run(2, skipped=True, loss=float("nan"))
    data = RunReader(folder.path).read()
    assert data.steps == []
    assert [row["loss"] for row in data.skipped] == [None, None]


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        RunReader(tmp_path)
