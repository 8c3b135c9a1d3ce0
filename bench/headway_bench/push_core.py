"""Whole pushes: cast, compare, encode, carry, stage, apply, prove, through each channel and at each density.

The learner changes a share of its fp32 weights (every one of them by more than the published dtype's step), and
publishes; a generator's process stages, commits and proves. Times of one push, from the start of its publish:

    encode   until publish has handed over          wire     from there until the payload is with the generator
    stage    verified and decoded                   pause    the commit: decoding stands still
    prove    read back and digested, beside decoding
    total    until the commit has ended: the first token of the new version can be sampled
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

import numpy as np
import torch

from headway.errors import RunFailed
from headway.types import Manifest, PolicyVersion
from headway.weights import ChannelSender, WeightPublisher
from headway_bench.push_member import manifest_of
from headway_bench.push_process import MemberProcess
from headway_bench.push_wire import DEADLINE_S, open_sender

# shm with its ways of applying: a bf16 engine that is written or serves from the shared memory, an fp32 engine that
# bf16 weights are widened into, and the same with two buffers.
SHM_WAYS = ("shm", "shm swap", "shm widened", "shm double")
PUSH_CHANNELS = (*SHM_WAYS, "tcp", "store", "collective")
STAGES = ("encode", "wire", "stage", "pause", "prove", "total")


class PushContestant:
    """A channel under a publisher and a stager.

    Args:
        channel: of PUSH_CHANNELS.
        num_bytes: of one whole published state; folder: of the store.
    """

    def __init__(self, channel: str, num_bytes: int, folder: Path) -> None:
        self.channel = channel
        manifest = manifest_of(num_bytes // 2, "bfloat16")
        self._stack = contextlib.ExitStack()
        try:
            sender = self._open(channel, manifest, folder)
            mapped = channel.startswith("shm")
            self._publisher = WeightPublisher(
                sender, manifest, anchor=1 << 30, merged=0 if mapped else 1, deadline_s=DEADLINE_S
            )
            self._stack.callback(self._publisher.close)
            self._member = MemberProcess(
                "push",
                channel="shm" if mapped else channel,
                address=sender.address,
                num_elements=manifest.num_elements,
                dtype=manifest.dtype,
                engine_dtype="bfloat16" if channel in ("shm", "shm swap") else "float32",
                swap=channel == "shm swap",
                doubled=channel == "shm double",
            )
            self._stack.callback(self._member.close)
            self._member.answer()
        except BaseException:
            self._stack.close()
            raise
        self._flat = torch.ones(manifest.num_elements)
        self._step = 0
        self._order = np.random.default_rng(0)

    def _open(self, channel: str, manifest: Manifest, folder: Path) -> ChannelSender:
        if channel.startswith("shm"):
            from headway.weights.shm import ShmSender

            name = f"headway-bench-{uuid.uuid4().hex[:12]}-{os.getpid()}"
            return ShmSender(name, manifest)
        return open_sender(channel, manifest.digest, folder)

    def _change(self, density: float) -> None:
        """Another value for a share of the elements, spread evenly at random places."""
        self._step += 1
        value = 1.0 + (self._step % 100) / 64.0  # exact in bf16, and another one each time
        if density >= 1:
            self._flat.fill_(value)
            return
        count = max(1, round(density * len(self._flat)))
        stride = len(self._flat) // count
        first = int(self._order.integers(stride))
        self._flat[first : first + count * stride : stride] = value

    def run(self, density: float) -> dict[str, float]:
        """One push: seconds by stage, and "bytes" of the payload.

        Raises:
            RunFailed: the generator proved another state than was published.
        """
        self._change(density)
        self._member.send(step=self._step)
        self._member.answer()
        started = time.monotonic()
        published = self._publisher.publish(self._flat, PolicyVersion(0, self._step))
        handed_over = time.monotonic()
        answer = self._member.answer(DEADLINE_S)
        if answer["digest"] != published.digest:
            raise RunFailed(f"{self.channel}: proved {answer['digest']}, published {published.digest}")
        fetched_at = answer["fetched_at"]
        # A collective's publish returns when the payload has arrived; then all of the wire is in encode.
        handed_over = min(handed_over, fetched_at) if fetched_at > started else handed_over
        return {
            "bytes": float(published.num_bytes),
            "encode": handed_over - started,
            "wire": fetched_at - handed_over,
            "stage": answer["staged_at"] - fetched_at,
            "pause": answer["committed_at"] - answer["staged_at"],
            "prove": answer["proved_at"] - answer["committed_at"],
            "total": answer["committed_at"] - started,
        }

    def close(self) -> None:
        """End the channel and the generator."""
        self._stack.close()
