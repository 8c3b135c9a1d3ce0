"""Compiles libheadway_kernels_cuda.so from a checkout: `python -m headway_kernels.cuda.build [--arch 90] [--out FILE]`.

An installation does the same on a machine that has nvcc and a GPU driver (CMakeLists.txt); this is for a checkout, or
for a GPU machine that runs one. Blocks for the compiler: 20 s a core for one architecture, a minute for all.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import headway_kernels
from headway_kernels.cuda.library import FILE_NAME
from headway_kernels.errors import BackendUnavailable

ARCHITECTURES = (80, 90, 100)
SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "cuda"
LIMIT_S = 600.0
FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-cudart", "static")


def build(out: Path, architectures: Sequence[int] = ARCHITECTURES, *, limit_s: float = LIMIT_S) -> Path:
    """Compiles every source, as many at a time as there are cores, and links them.

    Args:
        out: the library to write. architectures: compute capabilities, as 90 for 9.0; the lowest is kept as PTX too.
        limit_s: for each run of the compiler.

    Raises:
        BackendUnavailable: no sources, no nvcc, a source that does not compile, or one that takes longer; holds the
            compiler's words.
    """
    sources = sorted(SOURCES.glob("*.cu"))
    nvcc = shutil.which("nvcc")
    if not sources:
        raise BackendUnavailable(
            f"{SOURCES} holds no CUDA sources: an installed package has none; use a checkout"
        )
    if nvcc is None:
        raise BackendUnavailable(
            "nvcc is not on the PATH: install the CUDA toolkit, or put its bin folder there"
        )
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    codes.append(f"-gencode=arch=compute_{min(architectures)},code=compute_{min(architectures)}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            [nvcc, *FLAGS, *codes, "-c", str(source), "-o", str(each)]
            for source, each in zip(sources, objects, strict=True)
        ]
        list(pool.map(lambda command: _run(command, limit_s), commands))
        linked = Path(folder) / FILE_NAME
        _run([nvcc, *FLAGS, *codes, "-shared", *map(str, objects), "-o", str(linked)], limit_s)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(linked, out)
    return out


def _run(command: list[str], limit_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise BackendUnavailable(f"nvcc took longer than {limit_s:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        raise BackendUnavailable(f"nvcc failed: {' '.join(command)}\n{done.stderr[-4000:]}")


def main(arguments: Sequence[str]) -> int:
    """Builds beside the package unless told otherwise; 2 with a message where it cannot."""
    parser = argparse.ArgumentParser(prog="python -m headway_kernels.cuda.build", description=__doc__)
    parser.add_argument(
        "--arch", type=int, action="append", help="compute capability, as 90; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=Path(next(iter(headway_kernels.__path__))) / FILE_NAME)
    options = parser.parse_args(arguments)
    try:
        print(build(options.out, options.arch or ARCHITECTURES))
    except BackendUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
