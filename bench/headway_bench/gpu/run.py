"""The sections of the GPU script, in order, within a budget: see the package's docstring.

    python -m headway_bench.gpu [--loop] [--budget SECONDS] [--out FOLDER] [--commit TEXT] [--rehearse]

Exit codes: 0 every check passed; 1 a check failed or a section broke off; 2 wrong arguments; 3 no GPU; 4 a section
hung. What the budget left out is named at the end and in the table: no silent gap.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from headway_bench.gpu import checks, head_checks, head_times, library, limits, loop, memory_times, sanitize
from headway_bench.gpu.context import Context, OutOfTime
from headway_bench.gpu.report import Report

BUDGET_S = 450.0
# What a case in progress may take beyond its section; with it the run ends within 8 minutes.
GRACE_S = 25.0
PASSED, FAILED, NO_GPU, HUNG = 0, 1, 3, 4
RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Section:
    """A part of the run.

    Attributes:
        until: the share of the budget after which it starts nothing new. What it leaves is the next one's.
        least_s: what it needs to be worth starting.
    """

    name: str
    about: str
    until: float
    least_s: float
    run: Callable[[Context], None]


SECTIONS = (
    Section("library", "the CUDA library, built for this GPU unless it is there", 0.15, 0, library.make),
    Section("checks", "policy_loss, segment_scan, weight_delta, pack_cast: right?", 0.3, 10, checks.run),
    Section("head checks", "head_logp, head_loss_step, head_masked against fp64", 0.45, 10, head_checks.run),
    Section("limits", "the copy rate and the matrix rate of this GPU", 0.5, 3, limits.measure),
    Section("head times", "head_loss_step and head_logp against their rivals", 0.78, 20, head_times.run),
    Section("memory times", "the ops that memory bounds, against the copy rate", 0.88, 10, memory_times.run),
    Section("memcheck", "compute-sanitizer over the checks on small shapes", 1.0, 20, sanitize.run),
)
LOOP = (Section("loop", "real processes: learner, generators, pushes", 1.0, 30, loop.run),)


def main(arguments: Sequence[str]) -> int:
    """Runs every section that the budget allows; see the module's docstring for the exit codes."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.rehearse and options.out is not None and options.out.resolve().is_relative_to(RESULTS):
        parser.error(f"--out {options.out}: a rehearsal measures nothing and writes nothing to {RESULTS}")
    if not torch.cuda.is_available() and not options.rehearse:
        print(
            "no CUDA GPU is visible to torch: nothing was measured. On a machine with one, run the same command; "
            "--rehearse goes through every section at tiny sizes on the CPU, without figures that mean anything."
        )
        return NO_GPU
    began = time.monotonic()
    device = torch.device("cpu" if options.rehearse else "cuda:0")
    folder = options.out or (None if options.rehearse else RESULTS)
    title = ("The loop" if options.loop else "Kernels") + (
        " on a GPU" if device.type == "cuda" else ": rehearsal"
    )
    report = Report(
        folder,
        _file_name(device, "loop-" if options.loop else ""),
        describe(device),
        is_rehearsal=options.rehearse,
        commit=options.commit,
    )
    context = Context(device, options.rehearse, began + options.budget, report, title=title)
    if context.is_cuda:
        torch.cuda.set_device(device)
    left_out = run_sections(context, LOOP if options.loop else SECTIONS, began, options.budget)
    if left_out:
        report.note(f"LEFT OUT, because the budget of {options.budget:.0f} s was used: {', '.join(left_out)}")
    report.finish(context.title)
    failed = bool(context.wrong)
    verdict = f"{len(context.wrong)} WRONG" if failed else "every check that ran passed"
    gaps = f", {len(left_out)} left out" if left_out else ""
    print(
        f"{verdict}{gaps}; {time.monotonic() - began:.0f} s of {options.budget:.0f}; {report.describe_files()}"
    )
    return FAILED if failed else PASSED


def run_sections(context: Context, sections: Sequence[Section], began: float, budget_s: float) -> list[str]:
    """Runs the sections in order, each until its share of the budget is used up.

    One that raises is wrong, and the next goes on.

    Returns:
        What was left out.
    """
    left_out: list[str] = []
    for section in sections:
        context.deadline = began + section.until * budget_s
        if context.remaining_s() < (0 if context.is_small else section.least_s):
            left_out.append(section.name)
            continue
        print(f"{section.name}: {section.about} ({context.remaining_s():.0f} s)", flush=True)
        guard = _guard(context, section.name, context.remaining_s() + GRACE_S)
        try:
            section.run(context)
            context.synchronize()
        except OutOfTime as end:
            left_out.append(str(end))
        except Exception as error:  # a broken section must not take the others with it
            context.wrong.add((section.name, "section"))
            where = traceback.format_exception(error)[-2:]
            context.report.note(f"WRONG: section {section.name} broke off: {' '.join(where).strip()[-600:]}")
        finally:
            guard.cancel()
    return left_out


def _guard(context: Context, name: str, limit_s: float) -> threading.Timer:
    """Ends the process if a section outlasts its limit: a kernel that hangs cannot be called back."""

    def give_up() -> None:
        context.report.note(
            f"WRONG: section {name} did not end within {limit_s:.0f} s, so this run ends here: a kernel hangs, or "
            "one case takes that long. LEFT OUT: the rest of it, and all sections after it"
        )
        context.report.finish(context.title)
        os._exit(HUNG)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    return timer


def describe(device: torch.device) -> str:
    """The GPU, its memory and CUDA's version, in words."""
    if device.type != "cuda":
        return "no GPU (rehearsal on the CPU)"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def _file_name(device: torch.device, part: str) -> str:
    name = "rehearsal"
    if device.type == "cuda":
        name = "-".join(torch.cuda.get_device_name(device).lower().split())
    return f"gpu-{part}{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headway_bench.gpu", description="Kernels on a GPU, or the loop."
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help=f"seconds in all (default {BUDGET_S:.0f})"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="folder of the results (default: beside the benches; none in a rehearsal)",
    )
    parser.add_argument("--commit", default="", help="what the rows name, where the tree has no git to ask")
    parser.add_argument(
        "--loop",
        action="store_true",
        help="the whole loop instead of the kernels; needs the engine, and vLLM to test it",
    )
    parser.add_argument("--rehearse", action="store_true", help="every section at tiny sizes on the CPU")
    return parser
