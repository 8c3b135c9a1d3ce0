"""The stream bench: its messages are real ones, its floors do what they say, and its parts run."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.wire import decode
from headway.wire.messages import Trajectories
from headway_bench.harness import read_rows
from headway_bench.stream.bench import crowd_part, main, parse_options
from headway_bench.stream.content import payload
from headway_bench.stream.floors import append


def test_a_message_of_the_bench_is_a_valid_one_of_24_kb() -> None:
    frames = payload(parse_options([]).tokens)
    message = decode(frames)
    assert isinstance(message, Trajectories)
    assert 24_000 <= sum(map(len, frames)) <= 24_600


def test_the_append_floor_syncs_as_often_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", lambda fd: synced.append((tmp_path / "file").stat().st_size))
    append(tmp_path / "file", [b"abc", b"defg"], 0.01, 5)
    assert synced
    assert synced == [35 * turn for turn in range(1, len(synced) + 1)]
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("words", [["--rounds", "-1"], ["--slots", "8"], ["--seconds", "0"]])
def test_a_wrong_option_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(words)


@pytest.mark.slow
def test_every_part_runs_and_writes_its_rows(tmp_path: Path) -> None:
    words = ["--rounds", "1", "--seconds", "0.5", "--crowd", "0", "--results", str(tmp_path)]
    assert main(words) in (0, 1)
    [folder] = tmp_path.iterdir()
    rows = {row.case: row for row in read_rows(folder / "rows.jsonl")}
    assert rows.keys() == {"plane", "push/pull", "append", "append, group"}
    assert all(row.p50 > 0 for row in rows.values())
    plane, slower = rows["plane"].p50, min(rows["push/pull"].p50, rows["append"].p50)
    assert rows["plane"].ratios["of the slower"].p50 == pytest.approx(plane / slower)


@pytest.mark.slow
def test_every_generator_of_a_crowd_gets_its_tickets(tmp_path: Path) -> None:
    options = parse_options(["--crowd", "60", "--think", "0.5", "--crowd-seconds", "2", "--tokens", "200"])
    row = crowd_part(options, tmp_path / "journal", "on disk")
    assert row.config["generators"] == 60
    assert (
        len(row.values) > 120
    )  # 60 generators, 2 s, half a second a ticket: 240 less what a busy machine costs
    assert 0.0 < row.p50 <= float(row.config["p99_s"]) <= float(row.config["max_s"])
