"""Weight pushes: `headway bench push`. Bytes between processes, whole pushes by density, and several receivers.

    wire    every channel against memcpy, raw loopback TCP, gloo, safetensors and torch.save, by size
    push    cast to first token of the new version, through every channel, by size and share of changed elements
    fan     one learner, several receivers over tcp: its bytes, and the time to the last one

Contestants take turns in one run; what counts is the ratio within a round. docs/channels.md says how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console

from headway.errors import UnsupportedOption
from headway_bench.harness import (
    Row,
    exit_status,
    interleave,
    results_folder,
    rows_table,
    wide_console,
    write_rows,
)
from headway_bench.push_core import PUSH_CHANNELS, STAGES, PushContestant
from headway_bench.push_fan import FanOut
from headway_bench.push_member import touched
from headway_bench.push_report import (
    Finding,
    Push,
    fan_findings,
    fan_rows,
    findings_table,
    push_findings,
    push_rows,
    push_table,
    wire_findings,
    wire_rows,
)
from headway_bench.push_wire import BASELINES, CHANNELS, Source, WireContestant, shm_folder

MB = 1_000_000
STATES_EACH = 9  # whole states: fp32 masters and weights on two sides, buffers, a payload on its way


@dataclass(frozen=True)
class Options:
    """The command line of the bench.

    Attributes:
        parts: of "wire", "push", "fan"; wire_mb, push_mb, fan_mb: payload sizes; densities: shares changed;
        receivers: counts of the fan part; rounds: counted turns of each contestant, after one that is not.
    """

    parts: list[str]
    wire_mb: list[int]
    push_mb: list[int]
    fan_mb: int
    densities: list[float]
    receivers: list[int]
    rounds: int
    channels: list[str]
    results: Path


QUICK = Options(
    ["wire", "push", "fan"], [10, 200], [100], 50, [1e-4, 1e-2, 1.0], [1, 8], 5, list(PUSH_CHANNELS), Path()
)
FULL = Options(
    ["wire", "push", "fan"],
    [10, 100, 500, 2000],
    [10, 500, 2000],
    500,
    [1e-4, 1e-3, 1e-2, 1e-1, 1.0],
    [1, 2, 4, 8],
    9,
    list(PUSH_CHANNELS),
    Path(),
)


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line; argparse ends the process with status 2 on a fault."""
    parser = argparse.ArgumentParser(
        prog="headway bench push", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="all sizes and densities: an hour on two cores, 100 GB; see --channels",
    )
    parser.add_argument("--parts", help=f"comma-separated, of {', '.join(QUICK.parts)}")
    parser.add_argument(
        "--mb", type=int, action="append", help="payload size in MB; may be given several times"
    )
    parser.add_argument(
        "--density", type=float, action="append", help="share of elements changed; several times"
    )
    parser.add_argument(
        "--channels", help=f"of the push part; comma-separated, of {', '.join(PUSH_CHANNELS)}"
    )
    parser.add_argument("--rounds", type=int, help="counted turns of each contestant")
    parser.add_argument("--results", type=Path, default=Path("runs/bench"), help="folder for results")
    given = parser.parse_args(arguments)
    base = FULL if given.full else QUICK
    parts = given.parts.split(",") if given.parts else base.parts
    if unknown := [part for part in parts if part not in base.parts]:
        parser.error(f"--parts {','.join(unknown)}: there are {', '.join(base.parts)}")
    channels = given.channels.split(",") if given.channels else base.channels
    if unknown := [channel for channel in channels if channel not in base.channels]:
        parser.error(f"--channels {','.join(unknown)}: there are {', '.join(base.channels)}")
    if any(not 0 < density <= 1 for density in given.density or []):
        parser.error("--density: a share is above 0 and at most 1")
    if any(size < 1 for size in given.mb or []) or (given.rounds is not None and given.rounds < 1):
        parser.error("--mb and --rounds are at least 1")
    return Options(
        parts,
        given.mb or base.wire_mb,
        given.mb or base.push_mb,
        given.mb[0] if given.mb else base.fan_mb,
        given.density or base.densities,
        base.receivers,
        given.rounds or base.rounds,
        channels,
        given.results,
    )


def run_wire(num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds by contestant, one a round."""
    seconds: dict[str, list[float]] = {name: [] for name in (*BASELINES, *CHANNELS)}
    with shm_folder() as folder, contextlib.ExitStack() as stack:
        source = Source(touched(num_bytes))
        contestants: list[WireContestant] = []
        for name in seconds:
            contestants.append(WireContestant(name, source, folder))
            stack.callback(contestants[-1].close)
            contestants[-1].run()  # connections, first touches, mallocs of a new size
        for _, contestant in interleave(contestants, rounds):
            seconds[contestant.name].append(contestant.run())
    return seconds


def check_memory(num_bytes: int, channels: Sequence[str]) -> None:
    """All contestants are there at once, so that they can take turns.

    Raises:
        UnsupportedOption: that is more than this machine has free.
    """
    needed, free = STATES_EACH * num_bytes * len(channels), psutil.virtual_memory().available
    if needed > free:
        raise UnsupportedOption(
            f"{len(channels)} channels with states of {num_bytes // MB} MB need about {needed / 1e9:.0f} GB of "
            f"memory, {free / 1e9:.0f} are free: name fewer with --channels, or smaller sizes with --mb"
        )


def run_push(channels: Sequence[str], num_bytes: int, densities: Sequence[float], rounds: int) -> list[Push]:
    """Every channel at every density; each push with a memcpy of a whole state in the same round."""
    check_memory(num_bytes, channels)
    pushes: list[Push] = []
    with shm_folder() as folder, contextlib.ExitStack() as stack:
        copy = WireContestant("memcpy", Source(touched(num_bytes)), folder)
        contestants: list[PushContestant] = []
        for channel in channels:
            contestants.append(PushContestant(channel, num_bytes, folder))
            stack.callback(contestants[-1].close)
            contestants[-1].run(1.0)
        for density in densities:
            for contestant in contestants:
                contestant.run(density)
            for turn, contestant in interleave(contestants, rounds):
                times = contestant.run(density)
                pushes.append(Push(contestant.channel, num_bytes, density, turn, times, copy.run()))
    return pushes


def run_fan(num_bytes: int, receivers: Sequence[int], rounds: int) -> dict[int, list[dict[str, float]]]:
    """Rounds by number of receivers."""
    found: dict[int, list[dict[str, float]]] = {count: [] for count in receivers}
    source = Source(touched(num_bytes))
    with contextlib.ExitStack() as stack:
        groups: list[FanOut] = []
        for count in receivers:
            groups.append(FanOut(count, source))
            stack.callback(groups[-1].close)
            groups[-1].run()
        for _, group in interleave(groups, rounds):
            found[group.num_receivers].append(group.run())
    return found


def run_bench(options: Options, console: Console) -> list[Finding]:
    """Run the parts, save rows.jsonl, show the tables.

    Raises:
        RunFailed: a receiving process failed, or what arrived is not what was sent.
    """
    folder = results_folder(options.results, "push").resolve()
    console.print(f"results: {folder}", highlight=False, soft_wrap=True)
    rows: list[Row] = []
    found: list[Finding] = []
    if "wire" in options.parts:
        for size in options.wire_mb:
            seconds = run_wire(size * MB, options.rounds)
            part = wire_rows(size, seconds)
            rows += part
            found += wire_findings(size, seconds)
            console.print(rows_table(f"{size} MB from one process into memory of another", part))
    if "push" in options.parts:
        for size in options.push_mb:
            pushes = run_push(options.channels, size * MB, options.densities, options.rounds)
            rows += push_rows(pushes, STAGES)
            found += push_findings(pushes)
            console.print(push_table(size, pushes, STAGES))
    if "fan" in options.parts:
        fan = run_fan(options.fan_mb * MB, options.receivers, options.rounds)
        part = fan_rows(options.fan_mb, fan)
        rows += part
        found += fan_findings(options.fan_mb, fan)
        console.print(rows_table(f"{options.fan_mb} MB to several receivers over tcp", part))
    write_rows(rows, folder / "rows.jsonl")
    console.print(findings_table(found))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; 0: every bar was met, 1: one was not, 2: it could not run."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments)
    torch.set_num_threads(1)
    # Ended from outside it still removes what it made in shared memory, which may be gigabytes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return exit_status(lambda: all(finding.held for finding in run_bench(options, wide_console())))


if __name__ == "__main__":
    raise SystemExit(main())
