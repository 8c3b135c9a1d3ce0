"""The shm channel between processes: never half a version, whatever the writer does or dies of."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headway.errors import DeadlineExceeded
from headway.types import PolicyVersion
from headway.weights import WeightPublisher
from headway.weights.shm import ShmReceiver, ShmSender

Start = Callable[..., "subprocess.Popen[str]"]
MakeGenerator = Callable[..., Any]


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("how", ["copy", "swap", "double"])
@pytest.mark.parametrize("num_pushes", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_pushes_under_load_never_show_a_forward_two_values(
    name: str, start_writer: Start, writer: ModuleType, generator: MakeGenerator, how: str, num_pushes: int
) -> None:
    process = start_writer(name, "hammer")
    assert line(process) == "ready"
    manifest, swap = writer.manifest(), how == "swap"

    def join() -> Any:
        receiver = ShmReceiver(name, manifest, whole_only=swap)
        return generator(receiver, manifest, swap=swap, doubled=how == "double")

    there = join()
    pushes, seen = 0, PolicyVersion(0, 0)
    deadline = time.monotonic() + 240
    while pushes < num_pushes and time.monotonic() < deadline:
        if pushes % 50 == 49:  # joiners too
            there.stager.close()
            there = join()
        pushes += there.refresh()
        flat = there.engine.flat
        if there.engine.version is not None:
            assert float(flat.min()) == float(flat.max()) == there.engine.version.step
            assert there.engine.version >= seen
            seen = there.engine.version
    assert pushes == num_pushes
    assert process.stdin is not None
    process.stdin.close()
    assert int(line(process)) >= seen.step > num_pushes
    there.stager.close()
    assert process.wait(20) == 0


@pytest.mark.parametrize("stage", ["reserved", "cast", "delta", "finished"])
def test_a_writer_killed_at_any_step_of_a_publish_leaves_the_old_version_in_force(
    name: str, start_writer: Start, writer: ModuleType, generator: MakeGenerator, stage: str
) -> None:
    process = start_writer(name, "torn", stage)
    assert line(process) == "torn"
    manifest = writer.manifest()
    there = generator(ShmReceiver(name, manifest), manifest)
    for _ in range(2):  # while it writes, and after it was killed there
        there.refresh()
        late = generator(ShmReceiver(name, manifest), manifest)
        late.refresh()
        for each in (there, late):
            assert each.engine.version == PolicyVersion(0, 1)
            assert (each.engine.flat == 1).all()
        late.stager.close()
        process.kill()
        process.wait()
    there.stager.close()


def test_a_killed_reader_holds_nothing_and_a_frozen_one_until_it_is_killed(
    name: str, start_writer: Start, writer: ModuleType
) -> None:
    manifest = writer.manifest()
    publisher = WeightPublisher(ShmSender(name, manifest), manifest, merged=0, deadline_s=0.1)
    flat = torch.zeros(writer.NUM_ELEMENTS)
    readers = []
    for step in (1, 2):
        publisher.publish(flat.fill_(float(step)), PolicyVersion(0, step))
        readers.append(start_writer(name, script=Path(__file__).with_name("reader.py")))
        assert line(readers[-1]) == f"0.{step}"
    publisher.publish(flat.fill_(3.0), PolicyVersion(0, 3))
    with pytest.raises(DeadlineExceeded, match=str(readers[0].pid)):
        publisher.publish(flat.fill_(4.0), PolicyVersion(0, 4))
    readers[0].kill()
    readers[0].wait()
    for step in (4, 5, 6):
        publisher.publish(flat.fill_(float(step)), PolicyVersion(0, step))
    publisher.close()
