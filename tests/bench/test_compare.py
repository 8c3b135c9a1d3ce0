"""Rows against a baseline: what is worse than noise and tolerance is found, the rest is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from headway.errors import UnsupportedOption
from headway_bench import compare as module
from headway_bench import registry
from headway_bench.compare import baseline_of, compare, less_is_better, read_baseline
from headway_bench.harness import Row, make_row, recording, write_rows


def row(case: str, values: list[float], unit: str = "tokens/s", **config: int) -> Row:
    return make_row("record", case, unit, values, config=config)


def steady(median: float) -> list[float]:
    return [median * 0.99, median, median * 1.01]


def test_worse_than_tolerance_and_noise_is_a_regression_in_either_direction() -> None:
    before = [row("rate", steady(100.0)), row("time", steady(2.0), "s"), row("size", steady(50.0), "B")]
    now = [row("rate", steady(85.0)), row("time", steady(2.3), "s"), row("size", steady(40.0), "B")]
    found = compare(now, before)
    assert [change.row.case for change in found.regressed] == ["rate", "time"]
    assert [round(change.worse, 2) for change in found.changes] == [0.15, 0.15, -0.2]
    assert compare(now, before, tolerance=0.2).regressed == []


def test_what_noise_explains_is_no_regression() -> None:
    noisy = [60.0, 100.0, 140.0]
    assert compare([row("rate", [50.0, 80.0, 110.0])], [row("rate", noisy)]).regressed == []


def test_rows_meet_by_case_and_config() -> None:
    found = compare(
        [row("a", [1.0], size=1), row("b", [1.0])], [row("a", [1.0], size=1), row("a", [9.0], size=2)]
    )
    assert (len(found.changes), found.new, found.missing) == (1, ["b"], ["a"])
    with pytest.raises(UnsupportedOption, match="was it run with other options"):
        compare([row("a", [1.0], size=1)], [row("a", [1.0], size=2)])


def test_other_hardware_is_refused_by_name() -> None:
    mine = row("a", [1.0])
    other = msgspec.structs.replace(mine, hardware=dataclasses.replace(mine.hardware, cpu="another"))
    with pytest.raises(UnsupportedOption, match=r"the baseline is of another, .* this is "):
        compare([mine], [other])


def test_units_without_a_direction_are_refused() -> None:
    assert less_is_better("ms")
    assert not less_is_better("GB/s")
    assert not less_is_better("reward")
    with pytest.raises(UnsupportedOption, match="not known whether less is better"):
        less_is_better("furlongs")


def test_a_bench_is_gated_by_its_baseline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = iter([100.0, 99.0, 60.0])

    def main(arguments: list[str]) -> int:
        assert arguments == ["--own", "3"]
        write_rows([row("rate", steady(next(rates)))], tmp_path / "rows.jsonl")
        return 0

    monkeypatch.setattr(
        registry.importlib, "import_module", lambda _: type("Module", (), {"main": staticmethod(main)})
    )
    monkeypatch.setattr(module, "BASELINES", tmp_path / "baselines")
    with pytest.raises(UnsupportedOption, match="--keep-baseline makes one"):
        registry.run("record", ["--own", "3", "--compare", "baseline"])
    assert registry.run("record", ["--own", "3", "--keep-baseline"]) == 0
    assert baseline_of("record").exists()
    assert registry.run("record", ["--own", "3", "--compare", "baseline"]) == 0
    assert registry.run("record", ["--own", "3", "--compare", "baseline"]) == 1
    assert "regressed" in capsys.readouterr().out


def test_a_bench_that_writes_no_rows_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "before.jsonl"
    write_rows([row("rate", steady(1.0))], path)
    quiet = type("Module", (), {"main": staticmethod(lambda _: 0)})
    monkeypatch.setattr(registry.importlib, "import_module", lambda _: quiet)
    with pytest.raises(UnsupportedOption, match="give it --out FILE"):
        registry.run("record", ["--compare", str(path)])


def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(UnsupportedOption, match="holds no rows of a bench"):
        read_baseline("record", str(path))
    write_rows([row("rate", [1.0])], path)
    with pytest.raises(UnsupportedOption, match="holds no rows of lag"):
        read_baseline("lag", str(path))


def test_rows_are_recorded_only_meanwhile(tmp_path: Path) -> None:
    with recording() as rows:
        write_rows([row("a", [1.0])], tmp_path / "a")
    write_rows([row("b", [1.0])], tmp_path / "b")
    assert [each.case for each in rows] == ["a"]


@pytest.mark.parametrize("given", ["-0.1", "nan", "inf", "ten"])
def test_a_tolerance_is_a_share(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        registry.run("record", ["--tolerance", given])
    assert "expected a share, 0 or more" in capsys.readouterr().err
