"""`headway doctor`.

What this machine has and what follows from it. Never fails; a missing thing is a line.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "pyzmq", "msgspec", "pydantic")
_EXTRAS = {
    "reasoning_gym": "envs: data sets by name (env.name = gym:...)",
    "pyarrow": "envs: prompts from Parquet files",
    "plotly": "report: the page of a run (headway report, headway watch)",
    "matplotlib": "report: plots of the benches",
    "fsspec": "store: weights through an object store",
    "zstandard": "zstd: compressed pushes",
    "flash_attn": "not used yet",
    "vllm": "not used yet",
}


def examine() -> list[str]:
    """The report, one line a fact."""
    facts: list[tuple[str, Callable[[], str]]] = [
        ("headway", lambda: _version("headway")),
        ("python", lambda: f"{platform.python_version()} ({sys.executable})"),
        ("system", lambda: f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("packages", lambda: ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)),
        ("cores", _cores),
        ("memory", _memory),
        ("shared memory", _shared_memory),
        ("compiler", _compiler),
        ("native library", _native),
        ("device", _device),
    ]
    lines = [f"{name:<15} {_guarded(fact)}" for name, fact in facts]
    for module, purpose in _EXTRAS.items():
        found = "yes" if importlib.util.find_spec(module) else "no "
        lines.append(f"{'extra':<15} {found} {module} ({purpose})")
    return lines


def _guarded(fact: Callable[[], str]) -> str:
    try:
        return fact()
    except Exception as error:
        return f"unknown: {type(error).__name__}: {error}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cores() -> str:
    from headway.config.derived import available_cores

    return f"{available_cores()} usable of {os.cpu_count()}"


def _memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    return f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f} GiB"


def _shared_memory() -> str:
    from headway.launch.leftovers import shared_directory

    folder = shared_directory()
    usage = shutil.disk_usage(folder)
    return f"{folder}: {usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB (weights: 2 copies)"


def _compiler() -> str:
    found = [name for name in ("c++", "g++", "clang++", "cmake", "nvcc") if shutil.which(name)]
    return ", ".join(found) or "none: the native CPU library cannot be built here, PyTorch is used instead"


def _native() -> str:
    """Whether the kernels' CPU library loads; asks a child, so that a library that crashes is only a line."""
    code = (
        "from headway_kernels import native; "
        "print('loaded, for', *native.instruction_sets()) if native.available() "
        "else print('not loaded, PyTorch is used instead:', native.why_not())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode == 0:
        return done.stdout.strip()
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"not loaded: {last}"


def _device() -> str:
    if not Path("/dev/nvidiactl").exists() and not shutil.which("nvidia-smi"):
        return "no NVIDIA driver: CPU only"
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return (
        "; ".join(done.stdout.split("\n")).strip("; ") or "none found"
    ) + " (generation and training use the CPU for now)"
