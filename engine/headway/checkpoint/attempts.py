"""The attempts at a run: the first start and every resume, each with its epoch and what it started from.

    attempts/0.json, 1.json ...     what each started from, made durable before it trains anything
    attempts/0.toml, 1.toml ...     the resolved recipe of each
    attempts/0.machine.json ...     what its learner ran on

Epochs count attempts, so versions strictly increase over a run, whatever was rolled back. No torch here.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.config import RunConfig, RunFolder, to_toml
from headway.errors import CheckpointError
from headway.types import PolicyVersion


class Attempt(msgspec.Struct, frozen=True):
    """One attempt.

    Attributes:
        epoch: of its versions.
        checkpoint: name of the one that it starts from, "" for the initial weights.
        start: version of the weights that it starts from; None for the first attempt.
        lineage: one version per earlier epoch that these weights descend from: the step where it was left.
        without: pieces of the checkpoint that were left out on purpose.
    """

    epoch: int
    checkpoint: str = ""
    start: PolicyVersion | None = None
    lineage: list[PolicyVersion] = []
    without: list[str] = []
    pid: int = 0
    host: str = ""
    time_s: float = 0.0

    @property
    def version(self) -> PolicyVersion:
        """Of the weights before its first step."""
        return PolicyVersion(self.epoch, self.start.step if self.start else 0)


class Attempts:
    """The attempts of one run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.path / "attempts"

    def all(self) -> list[Attempt]:
        """In order.

        Raises:
            CheckpointError: one is missing or cannot be read.
        """
        found: list[Attempt] = []
        while (path := self._folder / f"{len(found)}.json").exists():
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Attempt))
            except (OSError, msgspec.DecodeError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None
        return found

    def last(self) -> Attempt:
        """The one that goes on; a folder without any is that of a first attempt."""
        found = self.all()
        return found[-1] if found else Attempt(0)

    def begin(
        self,
        config: RunConfig,
        checkpoint: str = "",
        start: PolicyVersion | None = None,
        without: Sequence[str] = (),
    ) -> Attempt:
        """Note a new attempt, durably.

        Args:
            config: its recipe. checkpoint, start: what it starts from.
        """
        earlier = self.all()
        attempt = Attempt(
            epoch=len(earlier),
            checkpoint=checkpoint,
            start=start if start is not None else (PolicyVersion(0, 0) if earlier else None),
            lineage=lineage(earlier, start or PolicyVersion(0, 0)) if earlier else [],
            without=list(without),
            pid=os.getpid(),
            host=socket.gethostname(),
            time_s=time.time(),
        )
        self._folder.mkdir(exist_ok=True)
        self._write(f"{attempt.epoch}.toml", to_toml(config).encode())
        self._write(f"{attempt.epoch}.json", msgspec.json.encode(attempt) + b"\n")
        return attempt

    def recipe(self, epoch: int) -> Path:
        """The resolved recipe of an attempt."""
        return self._folder / f"{epoch}.toml"

    def write_machine(self, epoch: int, facts: bytes) -> None:
        """What the attempt's learner runs on, as JSON."""
        self._folder.mkdir(exist_ok=True)
        self._write(f"{epoch}.machine.json", facts)

    def machine(self, epoch: int) -> bytes:
        """What write_machine kept; b"" when the attempt's learner never came up."""
        path = self._folder / f"{epoch}.machine.json"
        return path.read_bytes() if path.exists() else b""

    def _write(self, name: str, content: bytes) -> None:
        temporary = self._folder / f".{name}"
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._folder / name)
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def lineage(attempts: Sequence[Attempt], start: PolicyVersion) -> list[PolicyVersion]:
    """One version per earlier epoch that weights `start` descend from, or are the same as: where it was left.

    An attempt that started from weights of the lineage began with the same weights under its own epoch; whatever
    it sampled with them counts as theirs.
    """
    left: dict[int, int] = {}
    epoch, step = start.epoch, start.step
    by_epoch = {attempt.epoch: attempt for attempt in attempts}
    while True:
        left[epoch] = step
        parent = by_epoch[epoch].start if epoch in by_epoch else None
        if parent is None:
            break
        epoch, step = parent.epoch, parent.step
    for attempt in attempts:
        before = attempt.start
        if attempt.epoch not in left and before is not None and before.step <= left.get(before.epoch, -1):
            left[attempt.epoch] = before.step
    return [PolicyVersion(epoch, step) for epoch, step in sorted(left.items())]
