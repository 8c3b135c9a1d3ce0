"""What the simulated generators say: the names of the run that they belong to, and valid trajectories."""

from __future__ import annotations

import os

import numpy as np

from headway.types import (
    FinishReason,
    PolicyVersion,
    Sampling,
    Ticket,
    TimeSplit,
    Trajectory,
    VersionSpan,
    prompt_digest,
)
from headway.wire import encode
from headway.wire.messages import SCHEMA, Heartbeat, Hello, Trajectories, WeightAck

RUN_ID = "bench"
DIGEST = "bench"
VERSION = PolicyVersion(0, 0)
PROMPT_TOKENS = 32
MAX_TOKENS = 8192


class Content:
    """What every trajectory holds: the same sampled tokens.

    Args:
        tokens: of a trajectory, its prompt's included; 9 bytes of a message each.
    """

    def __init__(self, tokens: int) -> None:
        length = max(PROMPT_TOKENS + 1, tokens)
        rng = np.random.default_rng(0)
        self.completion = rng.integers(3, 30_000, length - PROMPT_TOKENS).astype(np.int32)
        self.mask = np.arange(length) >= PROMPT_TOKENS
        self.logprobs = np.where(self.mask, -rng.random(length), 0.0).astype(np.float32)
        self.spans = [VersionSpan(PROMPT_TOKENS, length, VERSION)]

    def trajectory(self, ticket: Ticket, member: int, incarnation: str) -> Trajectory:
        """A valid one for a ticket."""
        return Trajectory(
            trajectory_id=f"{incarnation}.{ticket.ticket_id}.{member}",
            ticket_id=ticket.ticket_id,
            member=member,
            prompt_index=ticket.prompt_index,
            prompt_hash=prompt_digest(ticket.prompt_ids),
            prompt_length=PROMPT_TOKENS,
            token_ids=np.concatenate((np.asarray(ticket.prompt_ids, np.int32), self.completion)),
            loss_mask=self.mask,
            logprobs=self.logprobs,
            spans=self.spans,
            temperature=ticket.sampling.temperature,
            finish_reason=FinishReason.STOP,
            reward=float(member % 2),
            num_cached=0,
            started_s=0.0,
            finished_s=0.0,
        )


def hello(incarnation: str, index: int) -> Hello:
    """Of a simulated generator."""
    return Hello(
        run_id=RUN_ID, schema=SCHEMA, generator=index, incarnation=incarnation, pid=os.getpid(), host="", max_running=1,
        serving=VERSION,
    )  # fmt: skip


def weight_ack(incarnation: str) -> WeightAck:
    """It serves the only version there is."""
    return WeightAck(incarnation=incarnation, version=VERSION, digest=DIGEST, pause_s=0.0)


def heartbeat(incarnation: str, seq: int) -> Heartbeat:
    """A sign of life."""
    return Heartbeat(
        incarnation=incarnation, seq=seq, stalled_s=0.0, serving=VERSION, running=0, waiting=0, tickets=0,
        generated=0, unsent=0, split=TimeSplit(0.0, 0.0, 0.0, 0.0),
    )  # fmt: skip


def answer(content: Content, ticket: Ticket, member: int, incarnation: str, seq: int) -> Trajectories:
    """A message of one trajectory."""
    return Trajectories(
        incarnation=incarnation,
        seq=seq,
        trajectories=[content.trajectory(ticket, member, incarnation)],
        failures=[],
        generated=0,
    )


def payload(tokens: int) -> list[bytes]:
    """The frames of one message of one trajectory."""
    ticket = Ticket(
        1, 1, [3] * PROMPT_TOKENS, 1, Sampling(1.0, MAX_TOKENS - PROMPT_TOKENS, [2]), 1, VERSION, 60.0
    )
    return [bytes(frame) for frame in encode(answer(Content(tokens), ticket, 0, "g0-flood", 1))]
