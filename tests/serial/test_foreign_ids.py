"""Ids that the model does not have cost their trajectories, counted, and not the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headway.config import RunConfig
from headway.serial import SerialRun
from headway.types import Trajectory
from headway.wire.messages import Trajectories


def foreign(trajectory: Trajectory) -> Trajectory:
    ids = trajectory.token_ids.copy()
    ids[-1] = 1_000_000
    return msgspec.structs.replace(trajectory, token_ids=ids)


def test_an_id_beyond_the_vocabulary_is_a_counted_drop(tiny_config: Callable[..., RunConfig]) -> None:
    run = SerialRun(tiny_config(steps=3))
    on_message, seen = run.desk.on_message, [0]

    def tamper(address: bytes, message: Any) -> None:
        if isinstance(message, Trajectories):
            seen[0] += 1
            if seen[0] == 1:
                message = msgspec.structs.replace(
                    message, trajectories=[foreign(message.trajectories[0]), *message.trajectories[1:]]
                )
        on_message(address, message)

    run.desk.on_message = tamper  # type: ignore[method-assign]
    try:
        records = list(run.steps())
    finally:
        run.close()
    assert [record.step for record in records] == [1, 2, 3]
    assert records[-1].trajectories["dropped.invalid"] == 1
