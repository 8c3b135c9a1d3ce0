"""compute-sanitizer over the checks on small shapes, each tool in a process of its own.

memcheck finds accesses out of bounds, racecheck those of shared memory that no barrier orders. Blocks until they end or
their limit; a fault is a failed check, a tool that cannot work here a note.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from headway_bench.gpu.context import Context

LIMIT_S = 110.0
LEAST_S = 15.0
FAULT = 9
PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)
# memcheck sees every kernel, racecheck those that this project's CUDA sources hold.
TOOLS = {"memcheck": (), "racecheck": ("--kernel-regex", "kns=headway")}
# Nothing, and what racecheck says instead.
CLEAN = ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards")
VERDICT = ("ERROR SUMMARY", "RACECHECK SUMMARY")


def find_sanitizer() -> str | None:
    """compute-sanitizer on the PATH or in the usual place."""
    return shutil.which("compute-sanitizer") or next(
        (place for place in PLACES if Path(place).is_file()), None
    )


def command(sanitizer: str, tool: str) -> list[str]:
    """What is run: this module's own process, with a code of its own for a fault."""
    own = [sys.executable, "-m", "headway_bench.gpu.sanitize", tool]
    options = ["--tool", tool, "--error-exitcode", str(FAULT), "--target-processes", "all", *TOOLS[tool]]
    return [sanitizer, *options, *own]


def run(context: Context) -> None:
    """Runs the tools one after another, within what is left of the section."""
    sanitizer = find_sanitizer()
    if context.is_small or sanitizer is None:
        reason = "a rehearsal has no GPU" if context.is_small else "compute-sanitizer is not installed"
        context.report.note(f"memcheck, racecheck: not run: {reason}")
        return
    for tool in TOOLS:
        if context.remaining_s() < LEAST_S:
            context.report.note(f"{tool}: not run: {context.remaining_s():.0f} s left")
        else:
            _run_tool(context, sanitizer, tool)


def _run_tool(context: Context, sanitizer: str, tool: str) -> None:
    limit = min(LIMIT_S, context.remaining_s())
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "HEADWAY_SANITIZE_S": f"{limit:.0f}"}
    try:
        done = subprocess.run(
            command(sanitizer, tool),
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        lines = (error.stdout or b"").decode(errors="replace").strip().splitlines()
        reached = f"; reached: {lines[-1].strip()}" if lines else ""
        context.report.note(f"{tool}: no verdict: not done within {limit:.0f} s{reached}")
        return
    said = done.stdout + done.stderr
    tail = " | ".join(line.strip() for line in said.splitlines() if line.strip())[-600:]
    if done.returncode == 0 and any(words in said for words in CLEAN):
        context.report.note(f"{tool}: 0 errors over the checks on small shapes")
    elif any(words in said for words in VERDICT):
        context.wrong.add((tool, "cuda"))
        context.report.note(f"WRONG: {tool}: exit code {done.returncode}: {tail}")
    else:
        context.report.note(f"{tool}: no verdict, exit code {done.returncode}: {tail}")


def main(tool: str) -> int:
    """The checks on the GPU, as the sanitizer's process; 1 where one fails."""
    import torch

    from headway_bench.gpu import checks, head_checks
    from headway_bench.gpu.report import Report

    device = torch.device("cuda", torch.cuda.current_device())
    deadline = time.monotonic() + float(os.environ.get("HEADWAY_SANITIZE_S", LIMIT_S))
    context = Context(device, True, deadline, Report(None, tool, "", is_rehearsal=True))
    checks.run(context)
    if tool == "memcheck":
        head_checks.run(context)
    return 1 if context.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
