"""What dead runs leave on a machine.

Shared memory and socket folders, named after the run and the owner's pid.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_SEGMENT = re.compile(r"headway-(?P<run>[0-9A-Za-z_.]+)-(?P<pid>\d+)(-.*)?")


def shared_directory() -> Path:
    """Where weight segments lie: /dev/shm, or the temporary folder where a system has none."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def remove_stale(folder: Path | None = None) -> list[Path]:
    """Removes this user's segments of any run whose owner is dead.

    Returns:
        What was removed.
    """
    return _remove(folder or shared_directory(), lambda match: not _alive(int(match["pid"])))


def remove_run(run_id: str, folder: Path | None = None) -> list[Path]:
    """Removes every segment of one run, and its socket folder. Only when its processes have ended.

    Returns:
        The segments that were removed.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    shutil.rmtree(Path(base) / f"headway-{os.getuid()}-{run_id}", ignore_errors=True)
    return _remove(folder or shared_directory(), lambda match: match["run"] == run_id)


def _remove(folder: Path, chosen: Callable[[re.Match[str]], bool]) -> list[Path]:
    removed: list[Path] = []
    for path in folder.glob("headway-*"):
        match = _SEGMENT.fullmatch(path.name)
        try:
            if match and path.is_file() and path.stat().st_uid == os.getuid() and chosen(match):
                path.unlink()
                removed.append(path)
        except FileNotFoundError:
            continue  # another run removed it at the same time
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
