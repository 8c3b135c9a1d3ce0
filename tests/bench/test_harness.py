"""The statistics, the interleaving and the rows that every bench shares."""

from collections import Counter
from io import StringIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headway.errors import UnsupportedOption
from headway_bench.harness import (
    Quantiles,
    Row,
    interleave,
    make_row,
    quantiles,
    ratios_by_round,
    read_rows,
    results_folder,
    rows_table,
    write_rows,
)


def test_order_rotates_by_one_each_round():
    order = ["".join(name for turn, name in interleave("ABC", 4) if turn == wanted) for wanted in range(4)]
    assert order == ["ABC", "BCA", "CAB", "ABC"]


@given(st.integers(1, 6), st.integers(1, 12))
def test_everybody_runs_once_a_round_and_rounds_do_not_mix(count: int, rounds: int):
    turns = list(interleave(range(count), rounds))
    assert Counter(turns) == Counter((turn, name) for turn in range(rounds) for name in range(count))
    assert [turn for turn, _ in turns] == sorted(turn for turn, _ in turns)


@given(st.integers(1, 6))
def test_everybody_takes_every_place_once_in_as_many_rounds_as_contestants(count: int):
    places = Counter((index % count, name) for index, (_, name) in enumerate(interleave(range(count), count)))
    assert set(places.values()) == {1}
    assert len(places) == count * count


def test_no_rounds_are_refused():
    with pytest.raises(UnsupportedOption, match="rounds = 0"):
        next(interleave("AB", 0))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_quantiles_are_those_of_numpy(values: list[float]):
    found = quantiles(values)
    expected = np.quantile(values, [0.2, 0.5, 0.8])
    np.testing.assert_allclose([found.p20, found.p50, found.p80], expected, rtol=1e-12, atol=1e-6)


def test_quantiles_of_nothing_are_refused():
    with pytest.raises(UnsupportedOption, match="no values"):
        quantiles([])


def test_ratios_are_formed_within_a_round():
    # The machine was half as fast in round 1: the ratio does not see it, a ratio of medians would.
    ours, theirs = {0: 200.0, 1: 100.0, 2: 200.0}, {0: 100.0, 1: 50.0, 2: 160.0}
    assert ratios_by_round(ours, theirs) == [2.0, 2.0, 1.25]


def test_a_round_that_one_side_lacks_does_not_count():
    assert ratios_by_round({0: 3.0, 1: 4.0, 2: 9.0}, {2: 3.0, 0: 1.0, 5: 1.0}) == [3.0, 3.0]


def row() -> Row:
    return make_row(
        "rival",
        "w1/headway",
        "samples/s",
        [900.0, 1000.0, 1100.0],
        config={"digits": 5, "forced_length": False, "name": "w1", "lr": 1e-4},
        ratios={"over trl": [1.5, 2.0, 2.5], "over nobody": []},
        versions={"torch": "2.13.0"},
    )


def test_a_row_survives_the_disk(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = [row(), make_row("copy", "64 MB", "GB/s", [5.0], config={})]
    write_rows(rows, path)
    assert read_rows(path) == rows
    assert path.read_bytes().count(b"\n") == 2


def test_a_row_is_plain_json_with_these_fields():
    plain = msgspec.json.decode(msgspec.json.encode(row()))
    assert set(plain) == {
        *("bench", "case", "unit", "values", "p20", "p50", "p80", "ratios"),
        *("config", "commit", "hardware", "versions", "recorded_at"),
    }
    assert (plain["p20"], plain["p50"], plain["p80"]) == (pytest.approx(940), 1000, pytest.approx(1060))
    assert plain["ratios"] == {"over trl": {"p20": pytest.approx(1.7), "p50": 2.0, "p80": pytest.approx(2.3)}}
    assert set(plain["hardware"]) == {"cpu", "cores", "memory_gib", "accelerator"}
    assert plain["hardware"]["cores"] >= 1
    assert plain["versions"] == {"torch": "2.13.0"}


def test_a_row_without_a_field_is_refused(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    write_rows([row()], path)
    path.write_bytes(path.read_bytes().replace(b'"unit"', b'"units"'))
    with pytest.raises(msgspec.ValidationError, match="unit"):
        read_rows(path)


def test_versions_of_this_process_are_the_default():
    versions = make_row("copy", "64 MB", "GB/s", [5.0], config={}).versions
    assert versions["torch"].startswith("2.")
    assert versions["python"].startswith("3.")


def test_results_of_one_second_get_folders_of_their_own(tmp_path: Path):
    folders = {results_folder(tmp_path, "rival") for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.is_dir() and folder.name.startswith("rival-") for folder in folders)


def test_the_table_shows_spread_and_ratio():
    console = Console(width=160, record=True, file=StringIO())
    console.print(rows_table("title", [row()]))
    text = console.export_text()
    assert "1000 (940 to 1060)" in text
    assert "2.00 (1.70 to 2.30)" in text


def test_quantiles_are_formatted_with_their_spread():
    assert Quantiles(1.0, 2.345, 3.0).format() == "2.35 (1.00 to 3.00)"
