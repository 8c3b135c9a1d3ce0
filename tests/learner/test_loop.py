"""The main loop: what a step means for version, slots and pushes; unchanged weights are no fault of a flat batch."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.algo import PolicyStats
from headway.config import RunConfig
from headway.learner.loop import LearnerLoop
from headway.learner.publisher import PushStats
from headway.telemetry import SplitClock
from headway.trainer import StepStats, TrainBatch
from headway.types import PolicyVersion

GOOD = StepStats(0.5, 2.0, 1e-3, False, PolicyStats.zero(), TrainBatch([], [], 4, 4, 4))
FIRST = PolicyVersion(0, 0)
SKIPPED = dataclasses.replace(GOOD, skipped=True, grad_norm=float("nan"))


class Parts:
    """Stands for intake, trainer, publisher and recorder; writes down who was called with what."""

    def __init__(
        self,
        config: RunConfig,
        steps: list[StepStats],
        batches: int = 1000,
        start: PolicyVersion = FIRST,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rows: list[Any] = []
        self.notes: list[str] = []
        self.steps, self.batches = list(steps), batches
        self.stop = ""
        interval = config.push.interval
        self.lock = threading.Condition()
        self.saved: list[int] = []
        checkpoints = SimpleNamespace(
            maybe_save=self.saved.append, row=lambda record: None, take_blocked_s=lambda: 0.25
        )
        self.loop = LearnerLoop(
            config,
            start,
            cast("Any", self),
            cast("Any", SimpleNamespace(step=self.step)),
            cast(
                "Any", SimpleNamespace(publish=self.publish, due=lambda s, *, last: s % interval == 0 or last)
            ),
            cast("Any", SimpleNamespace(step=self.record)),
            lambda record: None,
            cast("Any", checkpoints),
            SplitClock(),
            self.rows.append,
            lambda: None,
            lambda: self.stop,
            self.notes.append,
        )

    def take(self, interrupted: Callable[[], bool]) -> list[Any]:
        if interrupted() or self.batches == 0:
            return []
        self.batches -= 1
        return ["group"]

    def step(self, groups: list[Any], number: int) -> StepStats:
        self.calls.append(("step", number))
        return self.steps.pop(0) if self.steps else GOOD

    def trained(self, groups: list[Any], version: PolicyVersion) -> None:
        self.calls.append(("trained", version.step))

    def publish(self, version: PolicyVersion, *, expect_change: bool) -> tuple[Any, PushStats]:
        self.calls.append(("publish", version.step, expect_change))
        return SimpleNamespace(digest=f"d{version.step}"), PushStats(0.1, 10, 0.5)

    def published(self, version: PolicyVersion, digest: str) -> None:
        self.calls.append(("published", version.step, digest))

    def record(
        self,
        groups: Any,
        consumed: Any,
        version: PolicyVersion,
        stats: StepStats,
        push: PushStats,
        blocked_s: float,
    ) -> Any:
        return SimpleNamespace(
            consumed=consumed.step,
            step=version.step,
            push=push.seconds,
            blocked_s=blocked_s,
            lag_max=0,
            reward=1.0,
            reward_std=1.0,
        )


Config = Callable[..., RunConfig]


def test_a_step_frees_its_slots_before_its_version_is_published(tiny_config: Config) -> None:
    parts = Parts(tiny_config(steps=2), [])
    assert parts.loop.run() == ""
    assert parts.calls == [
        ("publish", 0, False), ("published", 0, "d0"),
        ("step", 1), ("trained", 1), ("publish", 1, True), ("published", 1, "d1"),
        ("step", 2), ("trained", 2), ("publish", 2, True), ("published", 2, "d2"),
    ]  # fmt: skip
    assert [(row.consumed, row.step) for row in parts.rows] == [(0, 1), (1, 2)]


def test_a_run_that_goes_on_counts_from_its_start_and_looks_for_checkpoints_after_each_row(
    tiny_config: Config,
) -> None:
    parts = Parts(tiny_config(steps=7), [GOOD, SKIPPED, GOOD], start=PolicyVersion(2, 5))
    assert parts.loop.run() == ""
    assert parts.loop.version == PolicyVersion(2, 7)
    assert [call[1] for call in parts.calls if call[0] == "publish"] == [5, 6, 7]
    assert parts.saved == [6, 6, 7]
    assert [row.blocked_s for row in parts.rows] == [0.25] * 3


def test_a_skipped_step_ends_its_groups_and_neither_counts_nor_pushes(tiny_config: Config) -> None:
    parts = Parts(tiny_config(steps=2), [GOOD, SKIPPED, GOOD])
    assert parts.loop.run() == ""
    assert [call[:2] for call in parts.calls if call[0] in ("step", "trained", "publish")] == [
        ("publish", 0), ("step", 1), ("trained", 1), ("publish", 1), ("step", 2), ("trained", 1),
        ("step", 2), ("trained", 2), ("publish", 2),
    ]  # fmt: skip
    assert [row.step for row in parts.rows] == [1, 1, 2]


def test_pushes_follow_the_interval_and_the_last_step_is_pushed(tiny_config: Config) -> None:
    parts = Parts(tiny_config(steps=5, push={"interval": 2}, staleness={"max_lag": 4}), [])
    parts.loop.run()
    assert [call[1] for call in parts.calls if call[0] == "publish"] == [0, 2, 4, 5]
    assert [row.push for row in parts.rows] == [0.0, 0.1, 0.0, 0.1, 0.1]


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"lr": 0.0}, False), ({"grad_norm": 0.0, "loss": 0.0}, False)],
    ids=["update", "frozen", "every group flat"],
)
def test_a_change_is_expected_of_a_push_only_after_an_update_that_moves_something(
    tiny_config: Config, change: dict[str, float], expected: bool
) -> None:
    parts = Parts(tiny_config(steps=1), [dataclasses.replace(GOOD, **change)])
    parts.loop.run()
    assert parts.calls[-2] == ("publish", 1, expected)


def test_the_end_of_the_prompts_and_a_stop_are_named(tiny_config: Config) -> None:
    assert Parts(tiny_config(steps=9), [], batches=3).loop.run() == "the prompts are used up after 3 updates"
    parts = Parts(tiny_config(steps=9), [])
    parts.stop = "signal SIGTERM"
    assert parts.loop.run() == "signal SIGTERM"
    assert [call for call in parts.calls if call[0] == "step"] == []
