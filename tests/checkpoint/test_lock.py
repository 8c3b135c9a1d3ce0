"""One live attempt per run: the second is refused by name, and a dead owner keeps nobody out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from headway.checkpoint import RunLock
from headway.checkpoint.lock import STALE_S, Owner
from headway.errors import RunLocked

HOLD = """
import sys, time
from pathlib import Path
from headway.checkpoint import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def write_owner(folder: Path, **changes: object) -> None:
    owner = msgspec.structs.replace(Owner.me(), **changes)
    (folder / "lock").write_bytes(msgspec.json.encode(owner))


def test_a_live_owner_is_named_and_a_killed_one_is_taken_over(tmp_path: Path) -> None:
    process = hold(tmp_path)
    with pytest.raises(RunLocked, match=rf"in use by process {process.pid} on \S+, for 0 s"):
        RunLock(tmp_path)
    process.kill()
    process.communicate()
    lock = RunLock(tmp_path)
    assert lock.taken_from is not None
    assert lock.taken_from.pid == process.pid
    lock.release()
    lock.release()
    assert not (tmp_path / "lock").exists()
    RunLock(tmp_path).release()


def test_another_process_under_the_owners_pid_is_not_the_owner(tmp_path: Path) -> None:
    write_owner(tmp_path, started_s=1.0)
    lock = RunLock(tmp_path)
    assert lock.taken_from is not None
    lock.release()


def test_an_owner_on_another_host_holds_it_while_it_touches_it(tmp_path: Path) -> None:
    write_owner(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(RunLocked, match="process 1 on elsewhere"):
        RunLock(tmp_path)
    old = time.time() - STALE_S - 1.0
    os.utime(tmp_path / "lock", (old, old))
    RunLock(tmp_path).release()


def test_a_lock_that_was_taken_over_is_not_released_by_its_old_owner(tmp_path: Path) -> None:
    mine = RunLock(tmp_path)
    write_owner(tmp_path, pid=1, host="elsewhere")
    mine.release()
    assert (tmp_path / "lock").exists()


def test_a_torn_lock_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b'{"pid": 12')
    RunLock(tmp_path).release()
