"""A row as flat numbers: what sinks that know nothing of our types take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from headway.types import StepRecord, TimeSplit

NOT_NUMBERS = frozenset({"changes", "skipped", "step", "epoch"})


def scalars(record: StepRecord) -> dict[str, float]:
    """Every number of the row by name, as metrics.jsonl has it.

    Nested ones are named OUTER/INNER ("learner/idle", "dropped/stale"), trained tokens by lag "lag/0", "lag/1", ...
    """
    return dict(_numbers(record))


def _numbers(record: StepRecord) -> Iterator[tuple[str, float]]:
    for name, value in msgspec.structs.asdict(record).items():
        if name in NOT_NUMBERS:
            continue
        if name == "lag_histogram":
            yield from ((f"lag/{lag}", count) for lag, count in enumerate(value))
        elif isinstance(value, TimeSplit):
            yield from (
                (f"{name}/{part}", seconds) for part, seconds in msgspec.structs.asdict(value).items()
            )
        elif isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in value.items())
        else:
            yield name, value
