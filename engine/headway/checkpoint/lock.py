"""One live attempt per run folder: a lock that names its owner, and that outlives nobody.

`RUN/lock` holds pid, host, and when the owner started. It is stale when its owner is dead on this host (another
process under the same pid counts as dead), or when an owner on another host has not touched it for STALE_S; by
the clock of the file system, so that the hosts' clocks do not matter. A stale lock is taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path

import msgspec
import psutil

from headway.errors import RunLocked

TOUCH_S = 10.0
STALE_S = 60.0


class Owner(msgspec.Struct, frozen=True):
    """Who holds a run.

    Attributes:
        started_s: Unix time at which the process was started, as its host says; taken_s: when it took the lock.
    """

    pid: int
    host: str
    started_s: float
    taken_s: float

    @staticmethod
    def me() -> Owner:
        """This process."""
        return Owner(os.getpid(), socket.gethostname(), psutil.Process().create_time(), time.time())


class RunLock:
    """Held from construction to `release`.

    Args:
        folder: of the run.

    Raises:
        RunLocked: another process holds it, and lives; names it, and how long it has had it.

    Attributes:
        taken_from: the dead owner whose lock was taken over, None otherwise.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._mine = Owner.me()
        self._released = threading.Event()
        with _guard(folder):
            self.taken_from = self._check()
            temporary = folder / f".lock.{os.getpid()}"
            temporary.write_bytes(msgspec.json.encode(self._mine) + b"\n")
            temporary.replace(self._path)
        threading.Thread(target=self._touch, name="headway-lock", daemon=True).start()

    def release(self) -> None:
        """Give the run free. Idempotent."""
        if not self._released.is_set():
            self._released.set()
            if _read(self._path) == self._mine:
                self._path.unlink(missing_ok=True)

    def _check(self) -> Owner | None:
        owner = _read(self._path)
        if owner is None or self._stale(owner):
            return owner
        age = time.time() - owner.taken_s
        raise RunLocked(
            f"{self._path.parent} is in use by process {owner.pid} on {owner.host}, for {age:,.0f} s; "
            "wait for it or stop it. A lock whose owner is dead is taken over by itself"
        )

    def _stale(self, owner: Owner) -> bool:
        if owner.host != self._mine.host:
            probe = self._path.with_name(f".lock.{os.getpid()}")
            probe.touch()
            age = probe.stat().st_mtime - self._path.stat().st_mtime
            probe.unlink()
            return age > STALE_S
        try:
            process = psutil.Process(owner.pid)
            alive = process.status() != psutil.STATUS_ZOMBIE
            # create_time is computed from the boot time, which a clock that is set moves by a little
            return not alive or abs(process.create_time() - owner.started_s) > 2.0
        except psutil.NoSuchProcess:
            return True

    def _touch(self) -> None:
        while not self._released.wait(TOUCH_S):
            with contextlib.suppress(OSError):
                os.utime(self._path)


def _read(path: Path) -> Owner | None:
    """The owner, None when there is none (or a file that says nothing of one)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Owner)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


@contextlib.contextmanager
def _guard(folder: Path) -> Generator[None]:
    """Only one process at a time looks at the lock and replaces it."""
    fd = os.open(folder / ".lock.guard", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
