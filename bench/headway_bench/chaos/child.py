"""Learner and generators of a chaotic run: headway's own command line on a machine that misbehaves.

    python -m headway_bench.chaos.child CONTROL_PORT FOLDER learner|generator ...

CONTROL_PORT is the proxy's. While FOLDER/full exists, journal and checkpoint writes meet a full disk; FOLDER/clock
holds the seconds by which the wall clock is off.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headway.cli import main as headway_main
from headway.journal import Disk
from headway.journal.disk import Buffer
from headway_bench.chaos.proxy import ask

FULL, CLOCK = "full", "clock"


def fill_disk_on_demand(folder: Path) -> None:
    """Writes of every Disk raise ENOSPC while FOLDER/full exists."""
    write = Disk.write

    def guarded(self: Disk, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        if (folder / FULL).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, fd, buffers, offset)

    Disk.write = guarded


def shift_clock_on_demand(folder: Path) -> None:
    """time.time is off by what FOLDER/clock says."""
    real = time.time

    def shifted() -> float:
        try:
            return real() + float((folder / CLOCK).read_text())
        except (OSError, ValueError):
            return real()

    time.time = shifted


def through_the_proxy(control: int, words: list[str]) -> list[str]:
    """The generator's --connect with the proxy's ports in place of the learner's."""
    if "--connect" not in words:
        return words
    at = words.index("--connect") + 1
    ends = [end.removeprefix("tcp://") for end in words[at].split(",")]
    stand_ins = ",".join(f"tcp://127.0.0.1:{ask(control, end)}" for end in ends)
    return [*words[:at], stand_ins, *words[at + 1 :]]


def main(argv: Sequence[str]) -> None:
    """Misbehave, then be headway."""
    control, folder, words = int(argv[0]), Path(argv[1]), list(argv[2:])
    fill_disk_on_demand(folder)
    shift_clock_on_demand(folder)
    headway_main(through_the_proxy(control, words))


if __name__ == "__main__":
    main(sys.argv[1:])
