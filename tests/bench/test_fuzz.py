"""Hostile bytes at every socket of a real process: each counted, memory bounded, honest generators served."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from headway_bench.fuzz.bench import SHARES, Attack, Finding, TargetProcess, attack, schedule
from headway_bench.fuzz.mutate import Mutator, stream_seeds
from headway_bench.fuzz.target import Target
from headway_bench.stream.plane import recipe, running


def check(finding: Finding, num: int) -> None:
    assert finding.faults == []
    assert finding.sent.total() == num
    assert finding.sent.keys() == {"stream", "control", "requests", "weights"}
    assert (
        finding.accepted["stream"] == finding.accepted["weights"] == 0
    )  # whatever they said, they got nowhere
    assert {"frames", "head", "magic", "run", "unknown", "direction"} <= finding.rejected["stream"].keys()
    assert {"frames", "head", "magic", "run", "unjoined"} <= finding.rejected["weights"].keys()


class Here:
    """A target in this process; it takes its turns when it is asked for its counts."""

    def __init__(self, target: Target) -> None:
        self.target, self.endpoints = target, target.endpoints()

    def counts(self) -> dict[str, Any]:
        for _ in range(20):
            self.target.turn()
        return self.target.counts()


def test_mutated_messages_at_every_socket_are_all_counted(tmp_path: Path) -> None:
    with running(recipe(1, 32, 8, 2), tmp_path / "journal") as plane:
        target = Target(plane, f"fuzz-{uuid.uuid4().hex[:8]}")
        attacker = Attack(cast("TargetProcess", Here(target)), 0)
        attacker.finding.rss_first = target.counts()["rss"]
        try:
            for name in SHARES:
                attacker.burst(name, 400)
        finally:
            attacker.close()
            target.close()
        check(attacker.finding, 400 * len(SHARES))
        assert plane.num_peers == plane.num_trained == 0


@pytest.mark.slow
def test_a_process_under_fire_goes_on_serving(tmp_path: Path) -> None:
    finding = attack(10_000, 0, tmp_path)
    check(finding, 10_000)
    assert finding.trained > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_thousand_mutated_messages(tmp_path: Path, seed: int) -> None:
    check(attack(100_000, seed, tmp_path), 100_000)


def test_a_lost_count_grown_memory_and_leaked_descriptors_are_faults() -> None:
    finding = Finding(sent=Counter(stream=10), rejected={"stream": Counter(head=6, magic=3)})
    assert finding.faults == ["stream: 10 sent, 9 counted"]
    finding.accepted["stream"] = 1
    assert finding.faults == []
    finding.rss_most, finding.descriptors = 1 << 30, 100
    assert finding.faults == ["memory grew by 1024 MiB", "100 descriptors more than at the start"]


def test_the_mutations_of_a_seed_are_the_same_each_time_and_few_are_alike() -> None:
    first, again = (Mutator(random.Random(3), stream_seeds("x")) for _ in range(2))
    made = [first.next() for _ in range(2_000)]
    assert made == [again.next() for _ in range(2_000)]
    assert len({tuple(frames) for frames in made}) > 1_500


def test_a_schedule_has_every_message_and_every_socket() -> None:
    bursts = schedule(100_000, random.Random(0))
    assert {name for name, _ in bursts} == SHARES.keys()
    assert sum(size for _, size in bursts) == 100_000
