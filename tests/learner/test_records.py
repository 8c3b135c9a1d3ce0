"""Rows: lag by token, shares, rates and times against values worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from headway.algo import PolicyStats
from headway.buffer import Group
from headway.learner.publisher import NO_PUSH, PushStats
from headway.learner.records import Recorder
from headway.telemetry import SplitClock
from headway.trainer import StepStats, TrainBatch
from headway.types import FinishReason, PolicyVersion, TimeSplit, Trajectory

MakeOffice = Callable[..., Any]
MakeTrajectory = Callable[..., Trajectory]


def stats_of(groups: list[Group], **changes: Any) -> StepStats:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    batch = TrainBatch(trajectories, [], sum(t.num_sampled for t in trajectories), 40, 60)
    return dataclasses.replace(StepStats(0.5, 2.0, 1e-3, False, PolicyStats.zero(), batch), **changes)


@pytest.fixture
def place(office: MakeOffice) -> Any:
    made = office(batch={"prompts": 2, "samples": 2}, staleness={"max_lag": 4})
    made.recorder = Recorder(
        made.desk, list, SplitClock(), now=lambda: made.now, unix=lambda: made.now + 50_000.0
    )
    return made


def finished(place: Any) -> list[Group]:
    generator = place.generator().join()
    place.tick()
    for ticket in generator.granted()[:2]:
        generator.finish(ticket, rewards=[0.25, 0.75])
    return place.desk.take().groups


def test_lag_is_counted_per_token_at_consumption(place: Any, make_trajectory: MakeTrajectory) -> None:
    ticket = finished(place)[0].ticket
    versions = [PolicyVersion(0, step) for step in (3, 3, 3, 4, 4, 4, 4, 7, 7, 7)]
    trajectory = make_trajectory(ticket, 0, versions=versions, tokens=range(3, 13))
    assert len(trajectory.spans) == 3
    group = Group(ticket, [trajectory], [], 0.0)
    row = place.recorder.step([group], PolicyVersion(0, 8), PolicyVersion(0, 9), stats_of([group]), NO_PUSH)
    assert row.lag_histogram == [0, 3, 0, 0, 4, 3]
    assert row.lag_max == 5
    assert row.lag_mean == pytest.approx(3.4)
    assert (row.step, row.epoch) == (9, 0)
    again = place.recorder.step([group], PolicyVersion(0, 7), PolicyVersion(0, 8), stats_of([group]), NO_PUSH)
    assert again.lag_histogram == [3, 0, 0, 4, 3]
    status = place.recorder.status("finished", "")
    assert status.lag_histogram == [3, 3, 0, 4, 7, 3]
    assert status.max_lag_seen == 5


def test_a_rows_figures(place: Any, make_trajectory: MakeTrajectory) -> None:
    groups = finished(place)
    ticket = groups[0].ticket
    place.now += 4.0
    unix = place.now + 50_000.0
    made = [
        make_trajectory(ticket, 0, reward=1.0, tokens=(3, 4), finished_s=unix - 1.0),
        make_trajectory(ticket, 1, reward=0.0, tokens=(3, 4), finished_s=unix - 2.0),  # equals the first
        make_trajectory(
            ticket, 2, reward=None, tokens=(5, 6, 7, 8), finish_reason=FinishReason.LENGTH, finished_s=unix
        ),
    ]
    group = Group(ticket, made, [], 0.0)
    push = PushStats(0.125, 1024, 0.5)
    row = place.recorder.step([group], PolicyVersion(0, 0), PolicyVersion(0, 1), stats_of([group]), push)
    assert (row.reward, row.reward_std) == (0.5, 0.5)
    assert (row.num_groups, row.num_trajectories, row.num_tokens, row.num_forwarded) == (1, 3, 8, 40)
    assert row.completion_tokens == pytest.approx(8 / 3)
    assert row.stop_share == pytest.approx(2 / 3)
    assert row.duplicate_share == pytest.approx(1 / 3)
    assert row.queue_s == pytest.approx(1.0)
    assert row.tokens_per_s == pytest.approx(8 / 4.0)
    assert row.generated_per_s == pytest.approx(12 / 4.0)  # 2 groups x 2 members x 3 tokens arrived
    assert (row.push_s, row.push_bytes, row.changed_share) == (0.125, 1024, 0.5)
    assert (row.loss, row.grad_norm, row.lr, row.skipped) == (0.5, 2.0, 1e-3, False)
    assert row.elapsed_s == pytest.approx(4.0)
    assert row.time_s == unix
    assert row.generators == 1
    assert row.tickets == place.desk.gate.counts().tickets
    assert row.in_flight + row.buffered == row.tickets["in_flight"] + row.tickets["buffered"]


def test_replaced_groups_count_for_the_reward_though_they_were_not_trained(place: Any) -> None:
    generator = place.generator().join()
    place.tick()
    flat, *varied = generator.granted()[:3]
    generator.finish(flat, rewards=[1.0, 1.0])
    for ticket in varied:
        generator.finish(ticket, rewards=[0.0, 1.0])
    groups = place.desk.take().groups
    assert [group.ticket for group in groups] == varied
    row = place.recorder.step(groups, PolicyVersion(0, 0), PolicyVersion(0, 1), stats_of(groups), NO_PUSH)
    assert row.reward == pytest.approx((1 + 1 + 0 + 1 + 0 + 1) / 6)
    place.now += 1.0
    row = place.recorder.step(groups, PolicyVersion(0, 0), PolicyVersion(0, 1), stats_of(groups), NO_PUSH)
    assert row.reward == 0.5


def test_a_generators_time_is_a_lap_and_that_of_the_dead_is_not_forgotten(place: Any) -> None:
    groups = finished(place)
    first, second = place.generator(0), place.generator(1).join()
    first.beat(split=TimeSplit(3.0, 0.5, 1.0, 0.5))
    second.beat(split=TimeSplit(1.0, 0.5, 3.0, 0.5))
    row = place.recorder.step(groups, PolicyVersion(0, 0), PolicyVersion(0, 1), stats_of(groups), NO_PUSH)
    assert row.generator == TimeSplit(2.0, 0.5, 2.0, 0.5)
    first.beat(split=TimeSplit(5.0, 0.5, 1.0, 0.5))
    place.generator(0, life=1).join()  # the first is replaced
    second.beat(split=TimeSplit(2.0, 0.5, 3.0, 0.5))
    row = place.recorder.step(groups, PolicyVersion(0, 0), PolicyVersion(0, 1), stats_of(groups), NO_PUSH)
    assert row.generator == TimeSplit(1.5, 0.0, 0.0, 0.0)
    status = place.recorder.status("stopped", "signal SIGINT")
    assert status.generator == TimeSplit(3.5, 0.5, 2.0, 0.5)
    assert (status.status, status.cause) == ("stopped", "signal SIGINT")


def test_rates_of_the_run_are_from_the_first_ticket_to_the_last_update(place: Any) -> None:
    place.now += 100.0  # start-up
    groups = finished(place)
    for _ in range(4):
        place.now += 2.0
        place.recorder.step(groups, PolicyVersion(0, 0), PolicyVersion(0, 1), stats_of(groups), NO_PUSH)
    place.now += 60.0  # saving
    status = place.recorder.status("finished", "")
    assert status.wall_s == pytest.approx(8.0)
    assert status.samples_per_s == pytest.approx(4 * 4 / 8.0)
    assert status.tokens_per_s == pytest.approx(4 * 12 / 8.0)
    assert status.reward_last_10 == pytest.approx(0.5)


def test_a_run_that_never_started_has_a_status(place: Any) -> None:
    status = place.recorder.status("failed", "no model")
    assert (status.wall_s, status.samples_per_s, status.max_lag_seen, status.reward_last_10) == (
        0.0,
        0.0,
        0,
        0.0,
    )
