"""A trajectory of any shape, and one message of every kind."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from headway.types import (
    FinishReason,
    MemberFailure,
    PolicyVersion,
    Sampling,
    StepRecord,
    Ticket,
    TimeSplit,
    Trajectory,
    VersionSpan,
    prompt_digest,
)
from headway.wire.messages import (
    Bye,
    Cancel,
    Command,
    DataMessage,
    Event,
    Grant,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Received,
    Refused,
    Stop,
    Trajectories,
    VersionNotice,
    WeightAck,
    Welcome,
)

PROMPT = [3, 1, 4, 1, 5]


def build_trajectory(num_sampled: int = 9, member: int = 0, **changes: object) -> Trajectory:
    length = len(PROMPT) + num_sampled
    ids = np.array(PROMPT + list(range(7, 7 + num_sampled)), dtype=np.int32)
    mask = np.arange(length) >= len(PROMPT)
    trajectory = Trajectory(
        trajectory_id=f"g0-7f.11.{member}",
        ticket_id=11,
        member=member,
        prompt_index=2,
        prompt_hash=prompt_digest(PROMPT),
        prompt_length=len(PROMPT),
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -0.5 - np.arange(length) / 8, 0.0).astype(np.float32),
        spans=[VersionSpan(len(PROMPT), length, PolicyVersion(0, 3))],
        temperature=0.7,
        finish_reason=FinishReason.STOP,
        reward=0.25,
        num_cached=2,
        started_s=1.5e9,
        finished_s=1.5e9 + 1,
    )
    return msgspec.structs.replace(trajectory, **changes)


def build_ticket(**changes: object) -> Ticket:
    ticket = Ticket(
        ticket_id=11,
        prompt_index=2,
        prompt_ids=list(PROMPT),
        num_members=4,
        sampling=Sampling(temperature=0.7, max_new_tokens=16, stop_ids=[1, 2]),
        seed=(1 << 63) - 1,
        admitted=PolicyVersion(0, 2),
        deadline_s=600.0,
    )
    return msgspec.structs.replace(ticket, **changes)


def build_record() -> StepRecord:
    values: dict[str, object] = {}
    split = TimeSplit(1.0, 0.5, 0.25, 0.125)
    fixed = {"lag_histogram": [5, 1], "learner": split, "generator": split, "skipped": False, "changes": []}
    for field in msgspec.structs.fields(StepRecord):
        if field.name in fixed:
            values[field.name] = fixed[field.name]
        else:
            values[field.name] = {int: 3, float: 0.5}.get(field.type, {"issued": 4})
    return StepRecord(**values)


def build_messages() -> list[DataMessage]:
    version = PolicyVersion(1, 37)
    split = TimeSplit(1.0, 0.5, 0.25, 0.125)
    return [
        Hello(
            run_id="r",
            schema=1,
            generator=0,
            incarnation="g0-7f",
            pid=1,
            host="h",
            max_running=8,
            serving=None,
        ),
        Welcome(manifest_digest="ab", weight_channel="shm://x", version=version, heartbeat_s=2.0),
        Refused(reason="another run: \u00e9\U0001f600"),
        Grant(seq=1, tickets=[build_ticket(), build_ticket(ticket_id=12)]),
        Trajectories(
            incarnation="g0-7f",
            seq=5,
            trajectories=[build_trajectory(), build_trajectory(1, 1, reward=None)],
            failures=[MemberFailure(11, 2, "reward_failed", "boom", 7)],
            generated=99,
        ),
        Received(seq=5),
        WeightAck(incarnation="g0-7f", version=version, digest="ff", pause_s=0.01),
        VersionNotice(seq=2, version=version, digest="ff"),
        Cancel(ticket_ids=[1, 2, 3]),
        Stop(reason="done"),
        Bye(incarnation="g0-7f", unsent=0),
        Heartbeat(
            incarnation="g0-7f",
            seq=9,
            stalled_s=0.1,
            serving=version,
            running=1,
            waiting=2,
            tickets=3,
            generated=4,
            unsent=5,
            split=split,
        ),
        HeartbeatAck(seq=9),
        Event(ready="tcp://127.0.0.1:1", record=build_record(), status=b"{}"),
        Command(command_id=1, action="set", key="staleness.max_lag", value="1"),
    ]


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    return build_trajectory


@pytest.fixture(scope="session")
def make_ticket() -> Callable[..., Ticket]:
    return build_ticket


@pytest.fixture(scope="session")
def every_message() -> list[DataMessage]:
    return build_messages()
