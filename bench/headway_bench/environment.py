"""The rivals' virtual environment: found, or made with pinned versions and without touching headway's own.

And the checkpoint that all contestants start from, made once and cached.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from headway.errors import BackendUnavailable, RunFailed

# requests: TRL's asynchronous trainer builds a vLLM client even where another worker is given, and that
# needs it.
PINNED = ("torch==2.13.0", "trl==1.16.0")
UNPINNED = ("transformers", "datasets", "accelerate", "requests")
PACKAGES = ("torch", "trl", *UNPINNED)

_ASK_VERSIONS = """
import json, platform, sys
from importlib import metadata
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = ""
print(json.dumps(found))
"""


class RivalEnvironment:
    """A virtual environment that holds the rivals.

    Args:
        folder: of the environment; made and filled if it does not exist.
        say: called with one line before anything that takes long.

    Attributes:
        python: its interpreter.
        versions: of Python and the packages in it.

    Raises:
        BackendUnavailable: it exists but holds other versions than those compared against.
        RunFailed: packages could not be installed.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.python = folder.resolve() / ("Scripts" if os.name == "nt" else "bin") / "python"
        if not self.python.exists():
            say(f"making {folder} with {', '.join((*PINNED, *UNPINNED))}: minutes, and some GB of downloads")
            try:
                venv.create(folder, with_pip=True)
                self._install(folder)
            except BaseException:  # Ctrl-C too: half an environment must not pass for one
                shutil.rmtree(folder, ignore_errors=True)
                raise
        self.versions = self._ask_versions()
        faults = version_faults(self.versions)
        if faults:
            raise BackendUnavailable(
                f"{folder} is not the rivals' environment: {'; '.join(faults)}. "
                "Remove the folder to have it made anew, or name another with --venv."
            )

    def _install(self, folder: Path) -> None:
        done = subprocess.run([self.python, "-m", "pip", "install", *PINNED, *UNPINNED], check=False)
        if done.returncode:
            raise RunFailed(
                f"pip could not fill {folder} (exit code {done.returncode}, its lines are above) and removed it again; "
                "fill one yourself and name it with --venv if that cannot be mended"
            )

    def _ask_versions(self) -> dict[str, str]:
        done = subprocess.run(
            [self.python, "-c", _ASK_VERSIONS, *PACKAGES],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        found: dict[str, str] = json.loads(done.stdout)
        return found


def version_faults(versions: dict[str, str]) -> list[str]:
    """What differs from the pins, one phrase each; a local part ("2.13.0+cpu") is no difference."""
    wanted: dict[str, str] = {name: version for name, _, version in (pin.partition("==") for pin in PINNED)}
    faults: list[str] = []
    for package in PACKAGES:
        found = versions.get(package, "")
        expected = wanted.get(package, "")
        if not found:
            faults.append(f"{package} is missing")
        elif expected and found.partition("+")[0] != expected:
            faults.append(f"{package} is {found}, expected {expected}")
    return faults


def cache_folder() -> Path:
    """Where the bench keeps what it makes: $XDG_CACHE_HOME/headway/bench, or ~/.cache/headway/bench."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headway" / "bench"


def starting_checkpoint(say: Callable[[str], None]) -> Path:
    """The warmed-up digit sorter, from the cache or made now (a minute or two on one core).

    Raises:
        RunFailed: the warm-up failed or ended at a reward that leaves nothing to learn.
    """
    folder = cache_folder() / "sort5-240-steps"
    if not (folder / "model.safetensors").exists():
        say(f"warming up the model that everybody starts from, once, into {folder}")
        command = [sys.executable, "-m", "headway_bench.rivals.warmup", str(folder)]
        if subprocess.run(command, check=False, timeout=1800).returncode:
            raise RunFailed(f"the warm-up failed (its lines are above); command: {' '.join(command)}")
    return folder
