"""Pushes: when they are due, what share changed, and the alarm when training does not reach what is published."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.config import LearnerConfig
from headway.errors import WeightError
from headway.learner.publisher import MAX_UNCHANGED, Publisher, PushInterval
from headway.model import Policy, load_policy
from headway.trainer import FlatOptimizer
from headway.types import PolicyVersion
from headway.weights import WeightPublisher
from headway.weights.shm import ShmSender


class Channel:
    """A policy of a dtype behind a real segment."""

    def __init__(self, folder: Path, dtype: str, name: str, interval: int = 1) -> None:
        self.policy: Policy = load_policy(folder, published_dtype=dtype, with_grad=True)
        self.policy.round_to_published()
        self.core = WeightPublisher(ShmSender(name, self.policy.manifest), self.policy.manifest, merged=0)
        self.publisher = Publisher(self.core, self.policy, PushInterval(interval))
        self.step = 0

    def push(self, *, expect_change: bool = True) -> float:
        """Returns the changed share."""
        _, push = self.publisher.publish(PolicyVersion(0, self.step), expect_change=expect_change)
        self.step += 1
        assert 0 < push.num_bytes <= self.policy.manifest.num_bytes
        assert push.seconds >= 0
        return push.changed_share


@pytest.fixture
def names(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    from headway.weights.segment import shared_directory

    name = f"headway-test-publisher-{tmp_path.name}-{id(tmp_path)}"
    yield name
    (shared_directory() / name).unlink(missing_ok=True)


def test_pushes_are_due_every_interval_and_after_the_last_step(tiny_model: Path, names: str) -> None:
    channel = Channel(tiny_model, "float32", names, interval=3)
    due = [step for step in range(1, 9) if channel.publisher.due(step, last=step == 8)]
    assert due == [3, 6, 8]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_changed_share_counts_real_elements(tiny_model: Path, names: str, dtype: str) -> None:
    channel = Channel(tiny_model, dtype, names)
    assert channel.push(expect_change=False) == 1.0
    spec = channel.policy.manifest.tensors[0]
    num_elements = sum(tensor.size for tensor in channel.policy.manifest.tensors)
    channel.policy.flat[spec.offset : spec.offset + 100] += 1.0
    assert channel.push() == pytest.approx(100 / num_elements)
    assert channel.push(expect_change=False) == 0.0


def test_fp32_weights_that_do_not_change_twice_in_a_row_are_an_error(tiny_model: Path, names: str) -> None:
    channel = Channel(tiny_model, "float32", names)
    channel.push(expect_change=False)
    channel.push()
    channel.policy.flat[5] += 1.0
    channel.push()  # it changed: the count starts anew
    channel.push()
    with pytest.raises(WeightError, match="what is published is not what is trained"):
        channel.push()


def test_no_change_is_fine_when_none_is_expected(tiny_model: Path, names: str) -> None:
    channel = Channel(tiny_model, "float32", names)
    for _ in range(5):
        channel.push(expect_change=False)


def test_updates_below_the_bf16_step_warn_and_move_the_masters(
    tiny_model: Path, names: str, caplog: pytest.LogCaptureFixture
) -> None:
    channel = Channel(tiny_model, "bfloat16", names)
    with torch.no_grad():
        for parameter in channel.policy.module.parameters():
            parameter.fill_(1.0)
    optimizer = FlatOptimizer(channel.policy, LearnerConfig(max_grad_norm=1e9))
    before = optimizer.master.clone()
    channel.push(expect_change=False)
    shares = []
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * MAX_UNCHANGED):
            for parameter in channel.policy.module.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(1.0)
            optimizer.update(1e-6)
            shares.append(channel.push())
    assert shares == [0.0] * len(shares)
    assert (before - optimizer.master).max() == pytest.approx(2 * MAX_UNCHANGED * 1e-6, rel=0.05)
    warnings = [r.message for r in caplog.records if "below the published precision" in r.message]
    assert len(warnings) == 2
