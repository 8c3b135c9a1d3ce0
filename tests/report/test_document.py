"""The words, tables and stretches of the report, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.launch.closing import closing_lines
from headway.report import RunReader, document
from headway.report.columns import NUM_BINS, Columns, bins, columns
from headway.report.document import one_more_generator
from headway.types import LearnerStatus, TimeSplit


def status(learner_idle: float, generator_idle: float) -> LearnerStatus:
    return LearnerStatus(
        "finished", "", 1, 1.0, 1.0, 1.0, 0.0, 0, [1],
        TimeSplit(1.0 - learner_idle, 0.0, learner_idle, 0.0),
        TimeSplit(1.0 - generator_idle, 0.0, generator_idle, 0.0), {}, {}, {}, {},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("learner_idle", "generator_idle", "generators", "expected"),
    [
        (0.6, 0.0, 1, "+100%"),  # twice the generation; the learner could do 2.5 times
        (0.6, 0.0, 4, "+25%"),
        (0.1, 0.0, 2, "+11%"),  # half more generation, of which the learner takes 1/0.9
        (0.1, 0.4, 2, "+0 %"),
    ],
)
def test_another_generator_brings_the_smaller_of_what_both_sides_allow(
    learner_idle: float, generator_idle: float, generators: int, expected: str
) -> None:
    assert expected in one_more_generator(status(learner_idle, generator_idle), generators)


def test_without_times_the_counterfactual_is_unknown() -> None:
    assert one_more_generator(status(0.5, 0.0), 0).startswith("unknown")


def test_the_words_are_those_of_the_terminal(make_run: Any) -> None:
    folder = make_run(7)
    data = RunReader(folder.path).read()
    shown = document(data)
    assert shown["lines"] == closing_lines(data.status, data.config, folder.path)
    assert f"bottleneck: {shown['bottleneck']}" in shown["lines"]
    assert shown["bottleneck"].startswith("generation-bound: the learner idled 50%")
    tables = {table["title"]: table["rows"] for table in shown["tables"]}
    assert tables["Settings changed"] == [["3", "staleness.max_lag", "2", "user"]]
    assert tables["Where the time went"][0] == [
        "learner",
        "4.9 s (35%)",
        "0.7 s (5%)",
        "7.0 s (50%)",
        "1.4 s (10%)",
    ]


def test_a_reason_that_comes_later_is_zero_before() -> None:
    assert columns(
        [{"step": 1, "dropped": {}}, {"step": 2, "dropped": {"stale": 4}}, {"step": 3, "dropped": {}}]
    ) == {
        "step": [1, 2, 3],
        "dropped.stale": [0, 4, 0],
    }


def test_lags_from_15_on_share_a_column() -> None:
    table = columns([{"step": 1, "lag_histogram": [*range(20)]}])
    assert table["lag.14"] == [14]
    assert table["lag.15"] == [15 + 16 + 17 + 18 + 19]
    assert "lag.16" not in table


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0.0, 0.0, 1.5]), max_size=500))
def test_stretches_cover_all_rows_and_each_has_some_of_the_generators_time(told: list[float]) -> None:
    table: Columns = {"step": list(range(1, len(told) + 1))}
    table.update({f"generator.{part}": list(told) for part in ("work", "push", "idle", "other")})
    ends = bins(table)
    assert ends == sorted(set(ends))
    assert len(ends) <= NUM_BINS + 1
    assert not told or ends[-1] == len(told) - 1
    begin = 0
    for end in ends if any(told) else ():
        assert any(told[begin : end + 1])
        begin = end + 1
