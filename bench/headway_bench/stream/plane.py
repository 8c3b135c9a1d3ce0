"""The learner's side of the plane as in a run: intake, desk, gate, buffer, journal, acks. Only training is left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from headway.config import EnvConfig, RunConfig
from headway.config.loading import validate
from headway.envs import Environment
from headway.journal import Journal
from headway.journal.disk import Disk
from headway.learner.desk import Desk
from headway.learner.intake import Intake
from headway.learner.prompts import PromptSource
from headway.learner.setup import make_gate
from headway.learner.tickets import TicketMaker
from headway.model import Tokenizer
from headway.stream import LearnerSocket
from headway.wire.messages import Welcome
from headway_bench.stream.content import DIGEST, MAX_TOKENS, PROMPT_TOKENS, RUN_ID, VERSION


class _Prompts:
    """An environment and a tokenizer in one: as many prompts of PROMPT_TOKENS tokens as are asked for."""

    num_prompts = None

    def prompt(self, index: int) -> str:
        return str(index)

    def encode_prompt(self, prompt: str) -> list[int]:
        return [3 + int(sign) for sign in prompt.zfill(PROMPT_TOKENS)]


def recipe(generators: int, slots: int, prompts: int, samples: int) -> RunConfig:
    """A recipe whose slots return as soon as their groups are trained.

    Args:
        slots: tickets outstanding; prompts: groups of a batch; samples: members of a group.
    """
    return validate(
        {
            "model": {"path": "none"},
            "env": {"name": "none"},
            "steps": 10**9,
            "batch": {"prompts": prompts, "samples": samples, "tokens_per_row": MAX_TOKENS},
            "sampling": {"max_new_tokens": MAX_TOKENS - PROMPT_TOKENS},
            "staleness": {"policy": "drop", "max_lag": 1, "slots": slots},
            "generator": {"replicas": min(64, generators)},
        }
    )


class TimedDisk(Disk):
    """The journal's disk, and how long each of its fsyncs took."""

    def __init__(self) -> None:
        self.syncs_s: list[float] = []

    def sync(self, fd: int) -> None:
        began = time.monotonic()
        super().sync(fd)
        self.syncs_s.append(time.monotonic() - began)


class Plane:
    """A running learner without a trainer: batches are taken as soon as they are complete, and end.

    Attributes:
        intake: whose `endpoints` the generators connect to.
    """

    def __init__(self, config: RunConfig, journal: Journal) -> None:
        desk = Desk(
            config,
            RUN_ID,
            make_gate(config),
            PromptSource(
                cast("Environment", _Prompts()), cast("Tokenizer", _Prompts()), EnvConfig(name="none"), seed=0
            ),
            TicketMaker(config, (2,)),
            lambda version: Welcome(
                manifest_digest="", weight_channel="", version=version, heartbeat_s=config.stream.heartbeat_s
            ),
            lambda index, pid, why: None,
            time.monotonic,
        )
        desk.chronicle.journal = journal
        desk.published(VERSION, DIGEST)
        self._desk = desk
        self._journal = journal
        self._ending = False
        self.intake = Intake(
            desk, lambda: LearnerSocket(heartbeat_s=config.stream.heartbeat_s), patience_s=600.0
        )
        self._consumer = threading.Thread(target=self._consume, name="consumer", daemon=True)
        self._consumer.start()

    def _consume(self) -> None:
        while not self._ending:
            groups = self.intake.take(lambda: self._ending)
            if groups:
                self.intake.trained(groups, VERSION)

    @property
    def num_received(self) -> int:
        """Trajectories so far."""
        return self._desk.gate.ledger.counts().trajectories["received"]

    @property
    def num_trained(self) -> int:
        """Trajectories that were consumed."""
        return self._desk.gate.ledger.counts().trajectories["trained"]

    @property
    def num_commits(self) -> int:
        """Fsyncs of the journal so far."""
        return self._journal.num_commits

    @property
    def num_peers(self) -> int:
        """Generators that have joined."""
        return len(self._desk.peers)

    def check(self) -> None:
        """Raises AssertionError unless everything is conserved and valid."""
        with self.intake.lock:
            self._desk.gate.counts()
            assert not self._desk.invalid, self._desk.invalid

    def close(self) -> None:
        """End it."""
        self._ending = True
        self._consumer.join(5.0)
        self.intake.close("the bench is over")


@contextmanager
def running(config: RunConfig, folder: Path, disk: Disk | None = None) -> Generator[Plane]:
    """A plane with its journal in `folder`."""
    journal = Journal.open(folder, max_bytes=1 << 30, disk=disk)
    plane = Plane(config, journal)
    try:
        yield plane
        plane.check()
    finally:
        plane.close()
        journal.close()
