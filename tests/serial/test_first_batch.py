"""The first batch shows whether the two sides mean the same token by the same log-prob."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from headway.config import RunConfig
from headway.errors import TrainingStopped
from headway.serial import SerialRun
from headway.types import Trajectory
from headway.wire.messages import Trajectories


def shifted(trajectory: Trajectory) -> Trajectory:
    logprobs = trajectory.logprobs.copy()
    completion = logprobs[trajectory.prompt_length :]
    completion[:] = np.roll(completion, 1)
    return msgspec.structs.replace(trajectory, logprobs=logprobs)


@pytest.mark.parametrize("shift", [False, True])
def test_log_probs_shifted_by_one_stop_the_run_at_its_first_batch(
    tiny_config: Callable[..., RunConfig], shift: bool
) -> None:
    run = SerialRun(tiny_config(steps=1))
    on_message = run.desk.on_message

    def tamper(address: bytes, message: Any) -> None:
        if shift and isinstance(message, Trajectories):
            message = msgspec.structs.replace(
                message, trajectories=[shifted(t) for t in message.trajectories]
            )
        on_message(address, message)

    run.desk.on_message = tamper
    try:
        if shift:
            with pytest.raises(TrainingStopped, match=r"max \|pi - mu\|"):
                list(run.steps())
        else:
            (record,) = run.steps()
            assert record.start_check["tokens"] > 0
            assert record.start_check["max_log_ratio"] < 1e-4
            assert record.start_check["ess"] > 0.9999
    finally:
        run.close()
