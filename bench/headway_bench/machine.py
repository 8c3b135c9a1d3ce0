"""Where a figure was taken: commit, hardware, versions. Every row of a bench carries all three."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

REPORTED_PACKAGES = ("headway", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Hardware:
    """The machine, as far as throughput depends on it."""

    cpu: str
    cores: int
    memory_gib: float
    accelerator: str = ""


def this_hardware() -> Hardware:
    """CPU model, the cores this process may use, and memory."""
    return Hardware(cpu=_cpu_model(), cores=_usable_cores(), memory_gib=_memory_gib())


def installed_versions(packages: tuple[str, ...] = REPORTED_PACKAGES) -> dict[str, str]:
    """Version of Python and of each package; "source" for one that is importable but not installed."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "source"
    return versions


def this_commit(folder: Path | None = None) -> str:
    """Commit of the tree that holds `folder`, "-dirty" with tracked changes; "unknown" outside of git.

    Without a folder: of this file's tree, as it was when this process first asked.
    """
    return _own_commit() if folder is None else _commit_of(folder)


@functools.cache
def _own_commit() -> str:
    return _commit_of(Path(__file__).resolve().parent)


def _commit_of(where: Path) -> str:
    commit = _git(where, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changes = _git(where, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changes else commit


def _git(where: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(where), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return 0.0
