"""The shm channel between processes: never half a version, whatever the writer does or dies of."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from types import ModuleType

import torch

from headway.types import PolicyVersion
from headway.weights import ShmReceiver

Start = Callable[..., "subprocess.Popen[str]"]


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_thousand_fetches_while_versions_are_published_as_fast_as_possible_are_never_mixed(
    name: str, start_writer: Start, writer: ModuleType
) -> None:
    process = start_writer(name, "hammer")
    assert line(process) == "ready"
    manifest = writer.manifest()
    receiver = ShmReceiver(name, manifest)
    out = torch.zeros(manifest.num_elements)
    last = PolicyVersion(0, 0)
    for number in range(1000):
        if number % 20 == 0:  # joiners too
            receiver.close()
            receiver = ShmReceiver(name, manifest)
        newest = receiver.newest()
        version, _ = receiver.fetch(out)
        assert out.min() == out.max() == version.step
        assert version >= last
        assert newest is None or newest <= version
        last = version
    assert process.stdin is not None
    process.stdin.close()
    published = int(line(process))
    assert published >= last.step > 100
    receiver.close()
    assert process.wait(20) == 0


def test_a_writer_killed_in_the_middle_of_a_publish_leaves_the_old_version_in_force(
    name: str, start_writer: Start, writer: ModuleType
) -> None:
    process = start_writer(name, "torn")
    assert line(process) == "torn"
    receiver = ShmReceiver(name, writer.manifest())
    out = torch.zeros(writer.NUM_ELEMENTS)
    for _ in range(2):  # while it writes, and after it was killed there
        assert receiver.newest() == PolicyVersion(0, 1)
        assert receiver.fetch(out)[0] == PolicyVersion(0, 1)
        assert (out == 1).all()
        process.kill()
        process.wait()
    receiver.close()
