"""Generators of serial mode send no heartbeats and are alive by definition."""

from __future__ import annotations

from collections.abc import Callable

from headway.config import RunConfig
from headway.serial import SerialRun


def test_a_step_longer_than_the_heartbeat_gives_nobody_up(tiny_config: Callable[..., RunConfig]) -> None:
    lost: list[str] = []
    run = SerialRun(tiny_config(steps=3, stream={"heartbeat_s": 0.001}), lost.append)
    try:
        records = list(run.steps())
    finally:
        run.close()
    assert len(records) == 3
    assert records[-1].generators == 1
    assert not [line for line in lost if "given up" in line]
    assert records[-1].tickets.get("dropped.generator_lost", 0) == 0
