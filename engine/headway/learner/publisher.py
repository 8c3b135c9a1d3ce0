"""The learner's publisher: which steps are pushed, and whether pushes carry what training changed."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from headway.errors import WeightError
from headway.model import Policy
from headway.types import PolicyVersion
from headway.weights import Published, WeightPublisher

_log = logging.getLogger(__name__)
MAX_UNCHANGED = 2


@dataclass(frozen=True)
class PushStats:
    """One step's push, zeros without one.

    Attributes:
        seconds: the learner stood still for it; num_bytes: that a generator of the version before needs.
        changed_share: of the published elements.
    """

    seconds: float
    num_bytes: int
    changed_share: float


NO_PUSH = PushStats(0.0, 0, 0.0)


@dataclass
class PushInterval:
    """Optimizer steps per push, which may be changed while the run goes on.

    Attributes:
        steps: K.
    """

    steps: int

    def due(self, step: int, *, last: bool) -> bool:
        """Whether the weights after optimizer step `step` are pushed; the last ones always are."""
        return step % self.steps == 0 or last


class Publisher:
    """Publishes a policy's weights through a channel.

    Args:
        channel: the learner's core of it; policy: whose flat weights, as rounded, are published.
        interval: optimizer steps per push; its owner may change it.
    """

    def __init__(self, channel: WeightPublisher, policy: Policy, interval: PushInterval) -> None:
        self._channel = channel
        self._policy = policy
        self._interval = interval
        self._unchanged = 0
        # Channels read host memory. On a device the weights are copied to it once a push.
        self._host = None if policy.device.type == "cpu" else policy.flat.cpu()

    def due(self, step: int, *, last: bool) -> bool:
        """Whether the weights after optimizer step `step` are pushed; the last ones always are."""
        return self._interval.due(step, last=last)

    def publish(self, version: PolicyVersion, *, expect_change: bool) -> tuple[Published, PushStats]:
        """Push the weights as they are now.

        Args:
            expect_change: an update was made with a learning rate and a gradient above 0.

        Raises:
            WeightError: fp32 weights did not change although they should have, twice in a row.
        """
        started = time.perf_counter()
        flat = self._policy.flat
        if self._host is not None:
            flat = self._host.copy_(flat)
        published = self._channel.publish(flat, version)
        seconds = time.perf_counter() - started
        num_elements = sum(spec.size for spec in self._policy.manifest.tensors)
        if expect_change:
            self._watch(published)
        share = min(1.0, published.num_changed / max(1, num_elements))
        return published, PushStats(seconds, published.num_bytes, share)

    def _watch(self, published: Published) -> None:
        self._unchanged = 0 if published.num_changed else self._unchanged + 1
        if self._unchanged < MAX_UNCHANGED:
            return
        message = (
            f"{self._unchanged} pushes in a row changed nothing although the learning rate is above 0 "
            f"(version {published.version}, {self._policy.manifest.dtype})"
        )
        if self._policy.manifest.dtype == "float32":
            raise WeightError(f"{message}: what is published is not what is trained")
        if self._unchanged % MAX_UNCHANGED == 0:
            _log.warning(
                "%s: updates are below the published precision; raise learner.lr or push float32", message
            )
