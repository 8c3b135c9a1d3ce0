"""`headway bench fuzz`: mutated messages at every socket of a learner's process, which goes on serving.

Sent to the data, heartbeat, control, request and weight sockets of a process with the whole intake (desk, ledger,
journal), the supervisor's end of the control channel, and the tcp weight channel. What must hold:

    counted     each message sent is counted once: as a reject with its reason, or as accepted (control, requests)
    alive       the process lives, its memory stays bounded, and honest generators get their work trained throughout
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from rich.console import Console

from headway.errors import DeadlineExceeded, RunFailed
from headway.stream.transport import open_socket, receive_frames
from headway.weights.tcp_wire import MAGIC
from headway.wire import DEFAULT_LIMITS
from headway_bench.fuzz.mutate import Mutator, stream_seeds, weight_seeds
from headway_bench.fuzz.target import GENERATORS
from headway_bench.harness import make_row, results_folder, write_rows
from headway_bench.stream.bench import peer

SHARES = {"data": 0.5, "heartbeat": 0.15, "control": 0.1, "requests": 0.1, "weights": 0.15}
STREAM = ("data", "heartbeat")
BURST = 2_000
ANSWER_S, COUNTED_S = 60.0, 60.0
MAX_GROWTH_BYTES = 64 << 20
WARM_SHARE = 0.02


@dataclass
class Finding:
    """What was seen.

    Attributes:
        sent, accepted, rejected: messages, by socket ("stream": data and heartbeat); rejected by reason too.
        rss_first, rss_last, rss_most: bytes, of the process; first: after the warm-up.
        trained: honest trajectories meanwhile; descriptors: of the process, at the end less at the start.
    """

    seconds: float = 0.0
    sent: Counter[str] = field(default_factory=Counter[str])
    accepted: Counter[str] = field(default_factory=Counter[str])
    rejected: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    rss_first: int = 0
    rss_last: int = 0
    rss_most: int = 0
    trained: int = 0
    descriptors: int = 0

    @property
    def faults(self) -> list[str]:
        """What did not hold."""
        found: list[str] = []
        for name, sent in self.sent.items():
            counted = self.rejected[name].total() + self.accepted[name]
            if counted != sent:
                found.append(f"{name}: {sent} sent, {counted} counted")
        if self.rss_most - self.rss_first > MAX_GROWTH_BYTES:
            found.append(f"memory grew by {(self.rss_most - self.rss_first) >> 20} MiB")
        if self.descriptors > GENERATORS:
            found.append(f"{self.descriptors} descriptors more than at the start")
        return found


class TargetProcess:
    """headway_bench.fuzz.target as a child."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headway_bench.fuzz.target", str(folder), f"fuzz-{uuid.uuid4().hex[:8]}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self.endpoints: dict[str, str] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if not self._selector.select(ANSWER_S):
            raise DeadlineExceeded(f"the process under fire did not answer in {ANSWER_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RunFailed(f"the process under fire ended with {self._process.wait(10)}")
        return json.loads(line)

    def counts(self) -> dict[str, Any]:
        """As Target.counts.

        Raises:
            RunFailed: it has ended. DeadlineExceeded: it does not answer.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(b"counts\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> None:
        """Let it end in order, which checks that everything is conserved.

        Raises:
            RunFailed: it did not.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        if (status := self._process.wait(30)) != 0:
            raise RunFailed(f"the process under fire ended with {status}")

    def kill(self) -> None:
        """If it is still there."""
        self._process.kill()
        self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Attack:
    """Sends to one target, one socket after the other."""

    def __init__(self, target: TargetProcess, seed: int) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self.finding = Finding()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def burst(self, name: str, num: int) -> None:
        """Send so many to a socket, under a new identity, and wait until all are counted.

        Raises:
            RunFailed: the target ended. DeadlineExceeded: it does not answer, or lost count.
        """
        # A name of the control channel's only client gets further there than others do.
        identity = (
            "learner" if name == "control" and self._rng.random() < 0.7 else f"x{self._rng.getrandbits(40)}"
        )
        if name == "weights":
            mutator = Mutator(self._rng, weight_seeds(), len(MAGIC))
        else:
            mutator = Mutator(self._rng, stream_seeds(identity))
        socket = open_socket(self._context, zmq.DEALER, send_mark=0, limits=DEFAULT_LIMITS)
        try:
            socket.routing_id = identity.encode()
            socket.connect(self._target.endpoints[name])
            for index in range(num):
                socket.send_multipart(mutator.next())
                if index % 64 == 0:
                    _drain(socket)
            key = "stream" if name in STREAM else name
            self.finding.sent[key] += num
            self._settle(key, socket)
        finally:
            socket.close(linger=0)

    def _settle(self, key: str, socket: zmq.Socket[bytes]) -> None:
        """Wait until as many are counted as were sent; the socket stays open, so that nothing on it is lost."""
        finding = self.finding
        deadline = time.monotonic() + COUNTED_S
        while True:
            counts = self._target.counts()
            _drain(socket)
            finding.accepted = Counter(counts["accepted"])
            finding.rejected = {name: Counter(reasons) for name, reasons in counts["rejected"].items()}
            finding.rss_last = counts["rss"]
            finding.rss_most = max(finding.rss_most, finding.rss_last)
            counted = finding.rejected[key].total() + finding.accepted[key]
            if counted >= finding.sent[key]:
                return
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{key}: {finding.sent[key]} sent, {counted} counted after {COUNTED_S:g} s"
                )
            socket.poll(10)

    def close(self) -> None:
        """Close what is open."""
        self._context.destroy(linger=0)


def _drain(socket: zmq.Socket[bytes]) -> None:
    while receive_frames(socket, DEFAULT_LIMITS.max_frames) is not None:
        pass


def schedule(num: int, rng: random.Random) -> list[tuple[str, int]]:
    """Bursts (socket, messages) in random order; `num` messages in all."""
    bursts: list[tuple[str, int]] = []
    for name, share in SHARES.items():
        left = round(num * share)
        while left > 0:
            bursts.append((name, min(BURST, left)))
            left -= BURST
    rng.shuffle(bursts)
    return bursts


def attack(num: int, seed: int, folder: Path) -> Finding:
    """Send `num` messages to a new target.

    Raises:
        RunFailed: it ended, was not conserved, or stopped serving. DeadlineExceeded: it hangs.
    """
    target = TargetProcess(folder / "journal")
    at = target.endpoints
    try:
        with peer("crowd", f"{at['data']},{at['heartbeat']}", 200, GENERATORS, 0.05, 1e9) as crowd:
            _serving(target, crowd, 0)
            attacker = Attack(target, seed)
            finding = attacker.finding
            began, before = time.monotonic(), target.counts()
            trained = before["trained"]
            try:
                for place, (name, size) in enumerate(bursts := schedule(num, random.Random(seed))):
                    attacker.burst(name, size)
                    if not finding.rss_first and place >= WARM_SHARE * len(bursts):
                        finding.rss_first = finding.rss_last
                    trained = _serving(target, crowd, trained)
            finally:
                attacker.close()
            finding.seconds = time.monotonic() - began
            finding.trained = trained - before["trained"]
            finding.descriptors = _settled_descriptors(target, before["descriptors"])
        target.end()
        return finding
    finally:
        target.kill()


def _serving(target: TargetProcess, crowd: subprocess.Popen[bytes], trained: int) -> int:
    """Wait until more than `trained` honest trajectories were trained; returns how many."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        counts = target.counts()
        if crowd.poll() is not None:
            raise RunFailed(f"the honest generators ended with {crowd.returncode}")
        if counts["trained"] > trained and counts["peers"] == GENERATORS:
            return counts["trained"]
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the honest generators were not served for {ANSWER_S:g} s: {counts}")
        time.sleep(0.01)


def _settled_descriptors(target: TargetProcess, before: int) -> int:
    """Descriptors more than before, once the connections of the attack are gone."""
    deadline = time.monotonic() + 10.0
    while (more := target.counts()["descriptors"] - before) > GENERATORS and time.monotonic() < deadline:
        time.sleep(0.1)
    return more


def main(arguments: Sequence[str]) -> int:
    """Run the bench; 1 when something did not hold."""
    parser = argparse.ArgumentParser(
        prog="headway bench fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"), help="folder for results")
    given = parser.parse_args(arguments)
    if given.messages < 1:
        parser.error("--messages is at least 1")
    folder = results_folder(given.results, "fuzz")
    with tempfile.TemporaryDirectory(dir=folder, prefix="scratch-") as scratch:
        finding = attack(given.messages, given.seed, Path(scratch))
    _say(finding, given.seed)
    config = {
        "seed": given.seed, "rss_first": finding.rss_first, "rss_last": finding.rss_last, "rss_most": finding.rss_most,
        "trained": finding.trained, "seconds": finding.seconds,
        **{f"{name}.{reason}": num for name, reasons in finding.rejected.items() for reason, num in reasons.items()},
    }  # fmt: skip
    write_rows(
        [make_row("fuzz", "messages", "messages", [finding.sent.total()], config=config)],
        folder / "rows.jsonl",
    )
    return 1 if finding.faults else 0


def _say(finding: Finding, seed: int) -> None:
    console = Console()
    for name, sent in sorted(finding.sent.items()):
        rejected = finding.rejected[name]
        reasons = ", ".join(f"{reason} {num}" for reason, num in sorted(rejected.items()))
        console.print(
            f"{name}: {sent} sent, {finding.accepted[name]} accepted, {rejected.total()} rejected: {reasons}"
        )
    console.print(
        f"{finding.sent.total() / finding.seconds:.0f} messages a second; memory {finding.rss_first >> 20} MiB after "
        f"the warm-up, {finding.rss_last >> 20} at the end, {finding.rss_most >> 20} at most; {finding.trained} honest "
        f"trajectories trained meanwhile; descriptors {finding.descriptors:+d}; seed {seed}"
    )
    for fault in finding.faults:
        console.print(f"does not hold: {fault}")
