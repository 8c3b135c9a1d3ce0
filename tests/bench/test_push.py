"""The push bench: its bars are those that are claimed, and every part of it moves the bytes it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.errors import UnsupportedOption
from headway_bench.harness import read_rows, wide_console
from headway_bench.push import check_memory, parse_options, run_bench
from headway_bench.push_report import Push, fan_findings, push_findings, push_rows, wire_findings, wire_rows


def seconds(tcp: float) -> dict[str, list[float]]:
    return {
        "memcpy": [0.1] * 3,
        "raw tcp": [0.3] * 3,
        "raw tcp, small buffers": [0.2] * 3,
        "gloo broadcast": [0.6] * 3,
        "tcp": [tcp, tcp, 9.0],
    }


@pytest.mark.parametrize(
    ("tcp", "held"), [(0.3, [True, True, True]), (0.45, [True, False, False]), (0.6, [False, False, False])]
)
def test_tcp_is_held_to_raw_tcp_and_gloo_by_the_median_of_the_rounds(tcp: float, held: list[bool]) -> None:
    found = wire_findings(500, seconds(tcp))
    assert [finding.held for finding in found] == held
    assert found[0].value == pytest.approx(0.3 / tcp)
    assert wire_findings(10, seconds(tcp)) == [], "small sizes are shown, not judged"


def test_rates_and_shares_are_formed_within_a_round() -> None:
    [row] = [row for row in wire_rows(500, seconds(0.5)) if row.case == "wire/500MB/tcp"]
    assert row.values == pytest.approx([1.0, 1.0, 0.5 / 9])
    assert row.ratios["of memcpy"].p50 == pytest.approx(0.2)
    assert row.ratios["over gloo"].p50 == pytest.approx(1.2)


def test_a_push_is_held_to_memcpys_from_the_end_of_its_cast() -> None:
    times = {
        "encode": 5.0,
        "wire": 0.0,
        "stage": 0.1,
        "pause": 0.05,
        "prove": 0.1,
        "total": 5.15,
        "bytes": 4e6,
    }
    pushes = [
        Push("shm", 500_000_000, density, turn, times, 0.1) for density in (0.01, 1.0) for turn in range(3)
    ]
    values = {finding.claim: (finding.value, finding.held) for finding in push_findings(pushes)}
    assert values == {
        "500 MB, shm, 1 % changed: pause, memcpys": (pytest.approx(0.5), False),
        "500 MB, shm, 1 % changed: wire bytes a parameter": (pytest.approx(0.016), True),
        "500 MB, shm, dense: pause, memcpys": (pytest.approx(0.5), True),
        "500 MB, shm, dense: end of the cast to applied and checked, memcpys": (pytest.approx(2.5), False),
    }
    assert len(push_rows(pushes, ("pause", "total"))) == 2 * 3


def test_the_worst_round_decides_what_a_learner_sent() -> None:
    rounds = {8: [{"first": 1.0, "last": 2.0, "sent": 2.0}, {"first": 1.0, "last": 2.0, "sent": 2.3}]}
    [finding] = fan_findings(50, rounds)
    assert (finding.value, finding.held) == (2.3, False)


@pytest.mark.parametrize(
    "arguments", [["--parts", "wires"], ["--density", "0"], ["--mb", "0"], ["--rounds", "0"]]
)
def test_options_that_cannot_be_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(arguments)


@pytest.mark.slow
def test_every_part_runs_and_leaves_rows(tmp_path: Path) -> None:
    options = parse_options(["--mb", "2", "--rounds", "1", "--density", "0.01", "--results", str(tmp_path)])
    found = run_bench(options, wide_console())
    assert [finding.held for finding in found] == [True], "the bytes that the learner sends"
    [path] = tmp_path.glob("push-*/rows.jsonl")
    kinds = {row.case.partition("/")[0] for row in read_rows(path)}
    assert kinds == {"wire", "push", "fan"}


def test_more_states_than_fit_into_memory_are_refused_before_anything_is_made() -> None:
    with pytest.raises(
        UnsupportedOption, match=r"5 channels with states of 10000000 MB need about .* --channels"
    ):
        check_memory(10_000_000 * 1_000_000, ["shm", "shm swap", "tcp", "store", "collective"])
