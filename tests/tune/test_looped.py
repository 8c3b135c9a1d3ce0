"""What a loop adds: figures of rows and timelines put together by hand, and a real run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.report.conftest import record

from headway.config import RunConfig
from headway.errors import RunFailed
from headway.planner import Rates, constant, proportional
from headway.report.processes import Process
from headway.tune.looped import Looped, corrected, looped, seen
from headway.types import TimeSplit

RATES = Rates(
    hardware="none", model="none", decode=proportional(10, 0.1), prefill=proportional(100, 0.1),
    train=proportional(1000, 1.0), groups=[[10, 10]], push_bytes=1000, prompt_tokens=5.0,
)  # fmt: skip


def run(*, decode: float, train: float, idle: float = 0.0, issued: int = 40) -> Looped:
    """Ten updates of 400 tokens and 20 prompts, 100 turns of 8 sequences; factors over RATES."""
    rows = [
        record(
            step,
            num_tokens=400,
            num_groups=20,
            learner=TimeSplit(0.5 * train, 0.2, idle, 0.03),
            generator=TimeSplit(1.0, 0.1, 0.0, 0.0),
            push_bytes=1000 * (step % 2),  # every other one
            pause_s=0.01,
            ack_s=0.5,
            tickets={"issued": issued * step // 10, "dropped.zero_variance": step},
        )
        for step in range(11)
    ]
    prefill_s = issued * 5 / 100 * 0.1
    return Looped(rows, 100.0, 800.0, decode * (100 * 0.08 + prefill_s), 0.4)


def test_what_a_synchronous_run_shows_is_for_good_and_the_rest_is_the_other_sides() -> None:
    alone, beside = run(decode=1.2, train=1.1, idle=1.0), run(decode=1.5, train=1.4)
    rates = corrected(RATES, alone, beside)
    assert rates.decode(10) == pytest.approx(1.2 * 0.1 + 0.4 / 100)
    assert rates.prefill(100) == pytest.approx(1.2 * 0.1)
    assert rates.train(1000) == pytest.approx(1.1)
    assert rates.train_beside == pytest.approx(1.4 / 1.1)
    planned_s = 100 * (1.2 * 0.08 + 0.004) + 1.2 * 0.2
    assert rates.decode_beside == pytest.approx(1.5 * (8 + 0.2) / planned_s)
    assert rates.turn == pytest.approx(0.03)
    assert rates.publish(1000) == pytest.approx(0.4)  # two rows' for each push
    assert rates.apply(1000) == pytest.approx(0.01)
    turn_s = (1.5 * 8.2 + 0.4) / 100
    assert rates.stage(1000) == pytest.approx(0.49 - 0.5 * turn_s)
    assert rates.zero_variance == pytest.approx(10 / 40)


def test_a_learner_that_idles_slows_its_generators_for_part_of_the_time_only() -> None:
    alone, beside = run(decode=1.0, train=1.0), run(decode=1.2, train=1.0, idle=0.73)  # as long as all else
    planned_s = 100 * (0.08 + 0.004) + 0.2
    factor = 1.2 * 8.2 / planned_s
    assert corrected(RATES, alone, beside).decode_beside == pytest.approx(1 + (factor - 1) / 0.5)
    faster = corrected(RATES, run(decode=1.0, train=1.0), run(decode=0.9, train=0.9))
    assert (faster.decode_beside, faster.train_beside) == (1.0, 1.0)


def process(name: str, side: str, *slices: tuple[float, float, float, int, int]) -> Process:
    """Slices of (begin, end, work, turns, sampled); what is not work is other."""
    rows = [[begin, end, work, 0.0, 0.0, end - begin - work] for begin, end, work, _, _ in slices]
    return Process(name, side, np.array(rows), np.array([each[3:] for each in slices], float))


def test_only_slices_between_the_rows_and_with_samples_count() -> None:
    rows = [record(step) for step in (1, 2, 3)]
    start, end = rows[0].time_s, rows[-1].time_s
    generators = [
        process(
            "generator 0", "generator",
            (start - 1, start, 0.9, 50, 50), (start, start + 1, 0.75, 3, 12), (start + 1, start + 2, 0.5, 7, 0),
        ),
        process("generator 1", "generator", (start + 1, end, 2.0, 5, 30), (end, end + 1, 1.0, 9, 9)),
        process("learner", "learner", (start, end, 3.0, 2, 5)),
    ]  # fmt: skip
    found = seen(rows, generators)
    assert (found.turns, found.sampled) == (8.0, 42.0)
    assert (found.work_s, found.other_s) == pytest.approx((2.75, 1.25))
    with pytest.raises(RunFailed, match="no generator at work"):
        seen(rows, generators[2:])


def test_a_real_run_of_a_recipe_corrects_its_calibration(tiny_config: Callable[..., RunConfig]) -> None:
    slow = constant(1.0)  # a second for what takes milliseconds: the run says so
    told: list[str] = []
    config: Any = tiny_config(steps=3, staleness={"max_lag": 2})
    rates = looped(msgspec.structs.replace(RATES, decode=slow, train=slow), config, 8.0, told.append)
    assert 0 < rates.decode(4) < 0.2
    assert 0 < rates.train(100) < 0.5
    assert rates.turn > 0
    assert rates.publish(1000) > 0
    assert rates.apply(1000) > 0
    assert min(rates.decode_beside, rates.train_beside) >= 1.0
    assert told == ["runs the recipe for 8 s, half of them synchronously"]
