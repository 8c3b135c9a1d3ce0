"""Rows to columns: what the page plots, each number as metrics.jsonl has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from headway.report.rows import Row

NUM_BINS = 200
MAX_LAGS = 16  # lags drawn each for itself; the last one stands for all from there on
NOT_NUMBERS = ("changes", "lag_histogram", "skipped")

Number = float | int | None
Columns = dict[str, list[Number]]


def columns(steps: Sequence[Row]) -> Columns:
    """Every number of the rows, by name.

    Nested ones are named OUTER.INNER ("learner.idle", "dropped.stale"; 0 where a row lacks them), trained tokens
    by lag "lag.0", "lag.1", ..., and "lag.15" for lag 15 and more.
    """
    table: Columns = {}
    for index, row in enumerate(steps):
        for name, value in _numbers(row):
            table.setdefault(name, [0] * index).append(value)
        for values in table.values():
            if len(values) == index:
                values.append(0)
    return table


def bins(table: Columns) -> list[int]:
    """The last row of each stretch of rows that a histogram or a time split is summed over.

    At most NUM_BINS of about equal length, and each with some of the generators' time in it, which they tell every
    few seconds only.
    """
    total = len(table.get("step", ()))
    parts = [table[f"generator.{part}"] for part in ("work", "push", "idle", "other")] if total else []
    ends: list[int] = []
    begin, told = 0, False
    for row in range(total):
        told = told or any(part[row] for part in parts)
        if told and row + 1 - begin >= total / NUM_BINS:
            ends.append(row)
            begin, told = row + 1, False
    if begin < total:  # the rest has none of it: it joins the last stretch
        ends = [*ends[:-1], total - 1]
    return ends


def _numbers(row: Row) -> Iterable[tuple[str, Number]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            for inner, number in cast("Mapping[str, Number]", value).items():
                yield f"{name}.{inner}", number
        elif name not in NOT_NUMBERS:
            yield name, cast("Number", value)
    histogram = cast("list[int]", row.get("lag_histogram", []))
    for lag, count in enumerate(histogram[: MAX_LAGS - 1]):
        yield f"lag.{lag}", count
    if len(histogram) >= MAX_LAGS:
        yield f"lag.{MAX_LAGS - 1}", sum(histogram[MAX_LAGS - 1 :])
